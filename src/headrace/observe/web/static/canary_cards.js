// A card for each canary: its phase and why, its stages, and both arms side by side.
"use strict";
window.headrace ??= {};
(() => {
  const { element, number, ms, percent, money, meter, table } = headrace;
  const PHASES = { running: "running", promoted: "promoted", rolled_back: "rolled back" };
  const VERDICTS = { breached: "worse", proven: "within its tolerance", open: "open" };

  const stillOr = (value, show) => (value === null || value === undefined ? "–" : show(value));
  const latency = (arm, name, at) => arm.latency[name]?.[at];

  // What is compared: title, the measure of the test, the value of an arm, how it is shown, and whether less is better.
  const rowsOf = (currency) => [
    ["requests", "requests", (arm) => arm.requests, (value) => number(value, 0), null],
    ["failed", "failures", (arm) => arm.failures, percent, true],
    ["failed checks", "checks", (arm) => arm.failed_checks, percent, true],
    ["quality", "quality", (arm) => arm.quality, (value) => number(value, 3), false],
    ["feedback", "feedback", (arm) => arm.feedback, (value) => number(value, 3), false],
    ["first token p50", null, (arm) => latency(arm, "ttft", "p50_ms"), ms, true],
    ["first token p95", "ttft", (arm) => latency(arm, "ttft", "p95_ms"), ms, true],
    ["gap p95", "itl", (arm) => latency(arm, "itl", "p95_ms"), ms, true],
    ["whole p95", "e2e", (arm) => latency(arm, "e2e", "p95_ms"), ms, true],
    ["cost per request", "cost", (arm) => arm.micros_per_request || null, (value) => money(value, currency), true],
    ["tokens per answer", null, (arm) => arm.tokens_per_request, (value) => number(value), null],
  ];

  const change = (control, candidate, lessIsBetter) => {
    if (!Number.isFinite(control) || !Number.isFinite(candidate) || !control) return "–";
    const share = candidate / control - 1;
    const text = `${share > 0 ? "+" : ""}${number(100 * share)} %`;
    return lessIsBetter === null ? text : element("span", (share > 0) === lessIsBetter && Math.abs(share) > 0.1 ? "bad" : "", text);
  };

  // The evidence grows by products, so the meters show its logarithm.
  const evidence = (test, needed) => {
    if (!test) return "–";
    const most = Math.max(test.breach_evidence, test.proof_evidence, 1);
    const share = Math.min(1, Math.log(most) / Math.log(needed));
    return meter(share, `${number(Math.min(most, needed), 1)} of ${number(needed, 0)}`, true);
  };

  const verdict = (test) => (test ? element("span", test.verdict, VERDICTS[test.verdict]) : "–");

  const steps = (canary) => {
    const list = element("ol", "steps");
    const stages = [...canary.stages.map((each) => `${number(each)} %`), "all"];
    const at = canary.phase === "promoted" ? stages.length - 1 : canary.phase === "running" ? canary.stage - 1 : -1;
    for (const [place, name] of stages.entries()) {
      const step = element("li", place === at ? "now" : place < at ? "past" : "", name);
      if (place === at) step.setAttribute("aria-current", "step");
      list.append(step);
    }
    list.setAttribute("aria-label", "Share of the requests");
    return list;
  };

  const why = (canary) => {
    const by = canary.by === "canary" ? "by itself" : canary.by ? `by ${canary.by}` : "";
    const at = new Date(canary.changed_at * 1000).toLocaleString();
    const verb = canary.phase === "running" ? (canary.stage > 1 ? "At this stage" : "Started") : canary.phase === "promoted" ? "Promoted" : "Rolled back";
    const reason = canary.reason ? `: ${canary.reason}` : "";
    return element("p", "why" + (canary.phase === "rolled_back" ? " bad" : ""), `${verb} ${by} at ${at}${reason}`.replace("  ", " "));
  };

  const arms = (target, canary, currency) => {
    if (!canary.evidence) {
      target.replaceChildren(element("p", "nothing", "No request has been compared yet."));
      return;
    }
    const { control, candidate, measures, needed_evidence: needed } = canary.evidence;
    const tests = new Map(measures.map((each) => [each.measure, each]));
    const known = (value) => value !== null && value !== undefined;
    const rows = rowsOf(currency).filter(([, , value]) => known(value(control)) || known(value(candidate)));
    table(target, [
      ["measure", ([title]) => title],
      [canary.control, ([, , value, show]) => stillOr(value(control), show)],
      [canary.candidate, ([, , value, show]) => stillOr(value(candidate), show)],
      ["verdict", ([, name]) => verdict(tests.get(name))],
      ["change", ([, name, value, , less]) => (name === "requests" ? "–" : change(value(control), value(candidate), less))],
      ["evidence", ([, name]) => evidence(tests.get(name), needed)],
    ], rows);
  };

  const agreement = (canary) => {
    const found = canary.evidence?.agreement;
    if (!found?.compared) return "";
    return `${number(found.compared, 0)} requests were answered by both variants: ${percent(found.exact_share)} the same text, mean similarity ${number(found.similarity, 3)}.`;
  };

  // Cards stay in the page while their content changes, so that a button in use keeps the focus.
  const canaryCards = (root, end) => {
    const cards = new Map();
    const make = (control) => {
      const card = root.appendChild(element("article", "card canary"));
      const title = element("h3"), phase = element("span", "phase"), buttons = element("div", "buttons");
      const made = { card, title, phase, about: element("div"), arms: element("div", "arms"), pairs: element("p", "hint"), promote: element("button", "main", "Promote"), back: element("button", "", "Roll back"), canary: null };
      for (const [button, what] of [[made.promote, "promote"], [made.back, "rollback"]]) {
        button.type = "button";
        button.addEventListener("click", () => end(what, made.canary));
        buttons.append(button);
      }
      card.append(element("div", "canary-head"), made.about, made.arms, made.pairs);
      card.firstChild.append(title, phase, buttons);
      cards.set(control, made);
      return made;
    };
    return (canaries, currency, mayWrite) => {
      if (canaries.length && !cards.size) root.replaceChildren();
      const order = [...canaries].sort((one, other) => (other.phase === "running") - (one.phase === "running") || other.changed_at - one.changed_at);
      for (const canary of order) {
        const made = cards.get(canary.control) ?? make(canary.control);
        made.canary = canary;
        made.title.textContent = `${canary.candidate} in place of ${canary.control}`;
        made.phase.textContent = PHASES[canary.phase];
        made.phase.className = "phase " + canary.phase;
        made.about.replaceChildren(why(canary), steps(canary));
        arms(made.arms, canary, currency);
        made.pairs.textContent = agreement(canary);
        made.promote.hidden = !mayWrite || canary.phase !== "running";
        made.back.hidden = !mayWrite || canary.phase === "rolled_back";
        for (const [button, what] of [[made.promote, "Promote"], [made.back, "Roll back"]]) button.setAttribute("aria-label", `${what} ${canary.candidate}`);
      }
    };
  };

  Object.assign(headrace, { canaryCards });
})();
