// The lab: what is on trial on live traffic, and the buttons of canaries.
"use strict";
(() => {
  const { element, number, ms, percent, table } = headrace;
  const by = (id) => document.getElementById(id);
  const EVERY_MS = 2000;
  let latest = null;
  let timer = 0;
  let reading = null; // the AbortController of the request under way
  const phases = new Map(); // of canaries, by control and candidate

  const problem = (text) => {
    by("problem").textContent = text;
    by("problem").hidden = !text;
  };

  const state = (text, kind) => {
    by("state").textContent = text;
    by("state").className = "state " + kind;
  };

  // Canaries

  let ending = null; // what and which canary the dialog is about

  const end = (what, canary) => {
    ending = { what, control: canary.control };
    const promotes = what === "promote";
    by("end-title").textContent = promotes ? `Promote ${canary.candidate}` : `Roll back ${canary.candidate}`;
    by("end-about").textContent = `All requests for ${canary.control} go to ${promotes ? canary.candidate : canary.control}.`;
    by("end-do").textContent = promotes ? "Promote" : "Roll back";
    by("end-reason").value = "";
    by("end-dialog").returnValue = "cancel";
    by("end-dialog").showModal();
  };

  by("end-dialog").addEventListener("close", async () => {
    if (by("end-dialog").returnValue !== "do" || ending === null) return;
    const { what, control } = ending;
    try {
      await headrace.request(`/admin/v1/canary/${what}`, { method: "POST", body: { control, reason: by("end-reason").value } });
      problem("");
    } catch (error) {
      problem(error.message);
      return;
    }
    read();
  });

  by("start-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const failed = (text) => { by("start-error").textContent = text; by("start-error").hidden = !text; };
    const stages = by("stages").value.split(",").map((text) => Number(text));
    if (stages.some((each) => !Number.isFinite(each) || each <= 0)) {
      failed("Stages are ascending percentages, such as 5, 25, 50.");
      return;
    }
    const body = { candidate: by("candidate").value, control: by("control").value, stages, unit: by("unit").value, promote: by("promotion").value };
    if (by("start-reason").value) body.reason = by("start-reason").value;
    try {
      await headrace.request("/admin/v1/canary", { method: "POST", body });
    } catch (error) {
      failed(error.message);
      return;
    }
    failed("");
    by("start").open = false;
    by("canaries").focus();
    read();
  });

  const showForm = (lab) => {
    by("start").hidden = !headrace.hasKey() || lab.variants.length < 2;
    by("read-only").hidden = headrace.hasKey();
    const names = lab.variants.join();
    if (by("candidate").dataset.names === names) return; // the form may be in use
    by("candidate").dataset.names = names;
    for (const select of [by("candidate"), by("control")]) {
      select.replaceChildren(...lab.variants.map((name) => element("option", "", name)));
    }
    by("candidate").value = lab.variants.find((name) => name.includes("@")) ?? lab.variants.at(-1);
    by("control").value = by("candidate").value.split("@")[0];
    const { stages, unit, promote, slower, dearer, worse, failures } = lab.canary;
    by("stages").value = stages.join(", ");
    by("unit").value = unit;
    by("promotion").value = promote;
    by("tolerances").textContent = `Rolled back by itself when it is proven to be over ${percent(slower)} slower, ${percent(dearer)} dearer, ${percent(worse)} worse in quality, feedback or checks, or to fail ${percent(failures)} more often.`;
  };

  const showCards = headrace.canaryCards(by("canaries"), end);

  const announce = (canaries) => {
    for (const { control, candidate, phase, reason } of canaries) {
      const key = `${control}\n${candidate}`;
      if (phases.has(key) && phases.get(key) !== phase) by("announce").textContent = `The canary ${candidate} is ${phase.replace("_", " ")}. ${reason}`;
      phases.set(key, phase);
    }
  };

  // Shadows, quality and drift

  const plusMinus = (value, error) => (value === null ? "–" : number(value, 3) + (error === null ? "" : ` ± ${number(error, 3)}`));

  const showShadows = (lab) => table(by("shadows"), [
    ["shadow", (row) => row.name],
    ["variant", (row) => row.variant],
    ["judges", (row) => (row.judge === "shadow" ? "what is served" : "the variant")],
    ["compared", (row) => number(row.differences.compared, 0)],
    ["similarity", (row) => plusMinus(row.differences.similarity, row.differences.similarity_error)],
    ["lowest", (row) => number(row.differences.lowest_similarity, 3)],
    ["same text", (row) => percent(row.differences.exact_share)],
    ["length", (row) => (row.differences.length_ratio === null ? "–" : `× ${number(row.differences.length_ratio, 2)}`)],
    ["whole p95, served", (row) => ms(row.differences.served.e2e?.p95_ms)],
    ["shadow", (row) => ms(row.differences.other.e2e?.p95_ms)],
    ["failed", (row) => number(row.outcomes.failed ?? 0, 0)],
    ["tokens today", (row) => `${number(row.tokens_today, 0)} of ${number(row.tokens_per_day, 0)}`],
  ], lab.shadows, "No shadow is configured.");

  const showQuality = (lab) => table(by("quality"), [
    ["variant", (row) => row.variant],
    ["route", (row) => row.route],
    ["judged by", (row) => row.judge],
    ["compared", (row) => number(row.compared, 0)],
    ["quality", (row) => plusMinus(row.quality, row.quality_error)],
    ["same text", (row) => percent(row.exact_share)],
  ], lab.quality, "No double-check is configured: a shadow with judge = \"shadow\".");

  const showSemantic = (lab) => {
    by("semantic-section").hidden = !lab.semantic;
    if (!lab.semantic) return;
    const { thresholds, best, learned, checked_hits: checked, advice } = lab.semantic;
    by("semantic-advice").textContent = advice;
    const step = Math.ceil(thresholds.length / 12);
    const rows = thresholds.filter((row, place) => place % step === 0 || row.threshold === best);
    const named = (row) => (row.threshold === undefined ? row.name : row.threshold.toFixed(2));
    table(by("semantic"), [
      ["similarity from", (row) => (row.threshold === best && best !== null ? element("b", "", `${named(row)}, best`) : named(row))],
      ["share served", (row) => percent(row.share)],
      ["answers", (row) => number(row.served, 0)],
      ["wrong", (row) => number(row.wrong, 0)],
      ["share wrong", (row) => percent(row.wrong_share)],
      ["at most", (row) => percent(row.wrong_most)],
    ], [...rows, { ...learned, name: "learned thresholds" }, { ...checked, name: "served, and checked" }].filter((row) => row.served));
  };

  const drifted = (row) => (row.has_drifted ? element("b", "bad", "changed") : "no change shown");

  const showDrift = (lab) => {
    by("drift-section").hidden = !lab.drift;
    if (!lab.drift) return;
    const { mixes, means, quality, facts, requests_before: before, requests_after: after } = lab.drift;
    const largest = (row) => row.groups.slice(0, 2).map((each) => `${each.group} ${percent(each.before)} → ${percent(each.after)}`).join(", ");
    table(by("drift"), [
      ["mix", (row) => row.dimension],
      ["drift", (row) => percent(row.drift)],
      ["by chance", (row) => percent(row.by_chance)],
      ["largest changes", largest],
      ["", drifted],
    ], before && after ? mixes : [], `Nothing to compare yet: ${number(before, 0)} requests before, ${number(after, 0)} since.`);
    table(by("drift-means"), [
      ["mean", (row) => row.name],
      ["before", (row) => number(row.before, 3)],
      ["after", (row) => number(row.after, 3)],
      ["error of the change", (row) => (row.error === null ? "–" : `± ${number(row.error, 3)}`)],
      ["", drifted],
    ], [...means, ...quality.map((each) => ({ ...each, name: `quality of ${each.name}` })), ...facts.map((each) => ({ ...each, name: `supported facts, ${each.name}` }))]);
    table(by("facts"), [
      ["day", (row) => row.day],
      ["variant", (row) => row.variant],
      ["answers with facts", (row) => number(row.answers, 0)],
      ["facts that their sources have", (row) => percent(row.supported)],
    ], lab.drift.facts_by_day);
  };

  const show = (lab) => {
    latest = lab;
    problem("");
    state("live", "live");
    showForm(lab);
    showCards(lab.canaries, lab.currency, headrace.hasKey());
    announce(lab.canaries);
    showShadows(lab);
    showQuality(lab);
    showSemantic(lab);
    showDrift(lab);
  };

  const failed = (error) => {
    state("not connected", "lost");
    if (error.status === 401 || error.status === 403) problem(error.message + " Enter one with the button Key.");
    else if (error.status === 404) problem("This server has keys and no administrator. Give a key admin rights (admin = \"write\") and enter it with the button Key.");
    else if (error.status || latest === null) problem(error.message);
    return [401, 403, 404].includes(error.status);
  };

  const read = async () => {
    clearTimeout(timer);
    reading?.abort();
    const own = reading = new AbortController();
    let over = false;
    try {
      show(await headrace.request("/admin/v1/lab", { signal: own.signal }));
    } catch (error) {
      if (error.name === "AbortError") return;
      over = failed(error);
    }
    if (reading === own && !over && !document.hidden) timer = setTimeout(read, EVERY_MS);
  };

  document.addEventListener("visibilitychange", () => { if (!document.hidden) read(); });
  headrace.watchKey(read);
  read();
})();
