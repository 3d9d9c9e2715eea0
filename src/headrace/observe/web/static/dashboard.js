// The dashboard: follows the live state of the server and shows it.
"use strict";
(() => {
  const { element, number, ms, percent, bytes, money, meter, table } = headrace;
  const by = (id) => document.getElementById(id);
  const SECONDS = 300;
  const RETRY_MS = 2000;
  const FAST_S = 3600; // seconds that the switch sets fast mode for
  let latest = null;
  let paused = false;
  let follow = null; // the AbortController of the stream

  // Charts: their points are kept here, from the server's history and then from each snapshot.

  const points = []; // {at, ...}, ascending
  const figures = [
    { title: "Requests per second", names: ["answered", "failed"], values: (p) => [p.requests, p.failed] },
    { title: "Tokens per second", names: ["output", "prompt"], values: (p) => [p.output, p.prompt] },
    { title: "Time to first token", unit: "ms", names: ["p50", "p95"], values: (p) => [p.first50, p.first95] },
    { title: "Gap between tokens", unit: "ms", names: ["p50", "p95", "p99"], values: (p) => [p.gap50, p.gap95, p.gap99] },
    { title: "Running and waiting", names: ["running", "waiting"], values: (p) => [p.running, p.waiting] },
    { title: "KV memory", unit: "share", stacked: true, names: ["in use", "cached prefixes"], values: (p) => [p.kvUsed, p.kvCached] },
  ];
  for (const figure of figures) {
    const target = by("charts").appendChild(document.createElement("figure"));
    figure.draw = headrace.chart(target, { ...figure, seconds: SECONDS });
  }

  const pointOf = (live) => {
    const { traffic, engines } = live;
    const percentiles = live.latency.all.percentiles;
    const sum = (name) => engines.reduce((total, engine) => total + (engine[name] ?? 0), 0);
    const blocks = sum("kv_total");
    return {
      at: live.at, requests: traffic.requests_per_s, failed: traffic.failed_per_s,
      output: traffic.output_tokens_per_s, prompt: traffic.prompt_tokens_per_s,
      first50: percentiles.ttft?.p50_ms ?? null, first95: percentiles.ttft?.p95_ms ?? null,
      gap50: percentiles.itl?.p50_ms ?? null, gap95: percentiles.itl?.p95_ms ?? null, gap99: percentiles.itl?.p99_ms ?? null,
      running: traffic.running, waiting: sum("waiting"),
      kvUsed: blocks ? sum("kv_used") / blocks : null, kvCached: blocks ? sum("kv_cached") / blocks : null,
    };
  };

  // The server leaves out ticks without requests: nothing was answered then, and there are no latencies.
  const historyOf = (live) => {
    const { history, tick_s } = live.traffic;
    if (!history.length) return [];
    const known = new Map(history.map((tick) => [Math.round(tick.age_s / tick_s), tick]));
    const made = [];
    for (let age = Math.max(...known.keys()); age >= 1; age -= 1) {
      const tick = known.get(age);
      made.push({
        at: live.at - (tick?.age_s ?? age * tick_s), requests: (tick?.requests ?? 0) / tick_s, failed: (tick?.failed ?? 0) / tick_s,
        output: (tick?.output_tokens ?? 0) / tick_s, prompt: (tick?.prompt_tokens ?? 0) / tick_s,
        first50: tick?.ttft_p50_ms || null, first95: tick?.ttft_p95_ms || null,
        gap50: null, gap95: null, gap99: null, running: null, waiting: null, kvUsed: null, kvCached: null,
      });
    }
    return made;
  };

  // Parts of the page

  const measure = (value, unit) => (value === null ? "–" : `${number(value, 0)} ${unit}`);
  const rate = (value, unit) => (value === null || value === undefined ? "–" : `${number(value / 1e9)} G${unit}`);

  const tile = (name, value, note, bad = false) => {
    const made = element("div", bad ? "bad" : "", element("dt", "", name), element("dd", "big", value));
    if (note) made.append(element("dd", "", note));
    return made;
  };

  const showTiles = (live, point) => {
    const { traffic, latency: { all } } = live;
    const first = all.percentiles.ttft, gap = all.percentiles.itl;
    const restarts = live.engines.reduce((total, engine) => total + engine.restarts, 0);
    const silent = live.variants.filter((variant) => !variant.responsive);
    const tiles = [
      tile("Requests/s", number(traffic.requests_per_s, 2), `${number(traffic.running, 0)} running, ${number(point.waiting, 0)} waiting`),
      tile("Tokens/s", number(traffic.output_tokens_per_s), `${number(traffic.prompt_tokens_per_s)} of prompts`),
      tile("First token p95", ms(first?.p95_ms), `p50 ${ms(first?.p50_ms)}`),
      tile("Gap p95", ms(gap?.p95_ms), `p50 ${ms(gap?.p50_ms)}`),
      tile("In objectives", all.requests ? percent(all.good / all.requests, 2) : "–", `${number(all.requests, 0)} requests in 5 min`),
      tile("Failed", number(all.failed, 0), "by a fault of the server", all.failed > 0),
      tile("KV in use", percent(point.kvUsed), point.kvCached === null ? "" : `${percent(point.kvCached)} cached prefixes`),
      tile("Per 1,000 requests", money(all.micros_per_1000_requests, live.currency), `${number(all.machine_s_per_1000_requests)} machine-seconds`),
    ];
    if (restarts) tiles.push(tile("Restarts", number(restarts, 0), "of engine processes", true));
    if (silent.length) tiles.push(tile("Not responding", String(silent.length), silent.map((variant) => variant.name).join(", "), true));
    by("now").replaceChildren(...tiles);
  };

  const showObjectives = (live) => {
    by("objectives").hidden = !live.objectives.length;
    if (!live.objectives.length) return;
    const burn = (rate) => (rate >= 1 ? element("b", "bad", number(rate, 1)) : number(rate, 2));
    table(by("objectives").querySelector(".card"), [
      ["objective", (row) => objectiveName(row)],
      ["target", (row) => percent(row.target, 2)],
      ["attained", (row) => (row.attainment === null ? "–" : element(row.attainment < row.target ? "b" : "span", row.attainment < row.target ? "bad" : "", percent(row.attainment, 2)))],
      ["error budget left", (row) => (row.budget_left === null ? "–" : meter(row.budget_left, percent(Math.max(0, row.budget_left), 0)))],
      ["burn 5 min", (row) => burn(row.burn_rate["5m"])],
      ["1 h", (row) => burn(row.burn_rate["1h"])],
      ["6 h", (row) => burn(row.burn_rate["6h"])],
      ["3 days", (row) => burn(row.burn_rate["3d"])],
      ["alert", (row) => (row.alert ? element("b", "bad", row.alert) : "none")],
    ], live.objectives);
  };

  const LATENCIES = { ttft: "first token", itl: "gap", e2e: "whole" };
  const objectiveName = (row) => {
    if (row.threshold_ms === null) return `${row.slo}: does not fail`;
    return `${row.slo}: ${LATENCIES[row.objective.split("_")[0]]} within ${ms(row.threshold_ms)}`;
  };

  const openRequest = async (id) => {
    by("request-title").textContent = id;
    by("request").replaceChildren(element("p", "nothing", "Loading"));
    by("request-dialog").showModal();
    try {
      headrace.waterfall(by("request"), await headrace.request("/admin/v1/requests/" + encodeURIComponent(id)));
    } catch (error) {
      by("request").replaceChildren(element("p", "error", error.message));
    }
  };

  const requestLink = (row) => {
    const button = element("button", "link", row.request_id);
    button.type = "button";
    button.addEventListener("click", () => openRequest(row.request_id));
    return button;
  };

  const latencyColumns = (first, currency) => [
    first,
    ["requests", (row) => number(row.requests, 0)],
    ["failed", (row) => number(row.failed, 0)],
    ["first token p50", (row) => ms(row.percentiles.ttft?.p50_ms)],
    ["p95", (row) => ms(row.percentiles.ttft?.p95_ms)],
    ["gap p50", (row) => ms(row.percentiles.itl?.p50_ms)],
    ["p95", (row) => ms(row.percentiles.itl?.p95_ms)],
    ["whole p95", (row) => ms(row.percentiles.e2e?.p95_ms)],
    ["per 1,000", (row) => money(row.micros_per_1000_requests, currency)],
    ["drafts accepted", (row) => percent(row.draft_acceptance)],
  ];

  const showTables = (live) => {
    headrace.stages(by("stages"), live.stages);
    table(by("slowest"), [
      ["request", requestLink],
      ["model", (row) => row.model ?? "–"],
      ["tenant", (row) => row.tenant || "–"],
      ["whole", (row) => ms(row.duration_ms)],
      ["first token", (row) => ms(row.ttft_ms)],
      ["prompt", (row) => number(row.prompt_tokens, 0)],
      ["answer", (row) => number(row.output_tokens, 0)],
      ["ended", (row) => row.error ?? String(row.status)],
    ], live.slowest.slice(0, 10), "No requests in the last five minutes.");
    table(by("variants"), [
      ["variant", (row) => row.name],
      ["served by", (row) => row.served_by],
      ["precision", (row) => (row.precision === null ? "–" : typeof row.precision === "object" ? Object.values(row.precision).join(", ") : row.precision)],
      ["state", (row) => (row.responsive ? "responds" : element("span", "bad", "does not respond"))],
      ["restarts", (row) => number(row.restarts, 0)],
    ], live.variants);
    table(by("engines"), [
      ["replica", (row) => `${row.model} ${row.replica}`],
      ["running", (row) => number(row.running, 0)],
      ["waiting", (row) => number(row.waiting, 0)],
      ["preempted", (row) => number(row.preempted, 0)],
      ["KV in use", (row) => percent(row.kv_used_share)],
      ["reserved, unused", (row) => percent(row.kv_waste_share)],
      ["evictions", (row) => number(row.kv_evictions, 0)],
      ["reads", (row) => rate(row.bytes_per_s, "B/s")],
      ["computes", (row) => rate(row.operations_per_s, "op/s")],
      ["restarts", (row) => number(row.restarts, 0)],
    ], live.engines);
    by("gpus").hidden = !live.gpus.length;
    table(by("gpus"), [
      ["GPU", (row) => `${row.gpu} ${row.name}`],
      ["busy", (row) => percent(row.busy_share)],
      ["memory free", (row) => bytes(row.memory_free_bytes)],
      ["of", (row) => bytes(row.memory_total_bytes)],
      ["temperature", (row) => measure(row.celsius, "°C")],
      ["power", (row) => measure(row.watts, "W")],
      ["engines of", (row) => row.models.join(", ") || "–"],
    ], live.gpus);
    by("workers").hidden = !live.workers.length;
    table(by("workers"), [
      ["worker", (row) => row.address],
      ["model", (row) => row.model],
      ["state", (row) => (row.state === "ready" ? row.state : element("span", "bad", row.state))],
      ["found by", (row) => (row.discovered ? "registry" : "configuration")],
      ["requests of this server", (row) => number(row.requests, 0)],
      ["running", (row) => number(row.announced?.running, 0)],
      ["waiting", (row) => number(row.announced?.waiting, 0)],
      ["KV in use", (row) => percent(row.announced?.kv_used_share)],
    ], live.workers);
    const slice = by("by").value;
    const name = slice.slice(3);
    table(by("slices"), latencyColumns([by("by").selectedOptions[0].text, (row) => row[name] || "–"], live.currency),
      live.latency[slice] ?? [], "No requests in the last five minutes.");
    table(by("tenants"), [
      ...latencyColumns(["tenant", (row) => row.tenant || "–"], live.currency),
      ["budget left", (row) => (row.budget_left === null ? "–" : meter(row.budget_left, percent(row.budget_left)))],
    ], live.tenants, "No requests in the last five minutes.");
    table(by("budgets"), [
      ["budget of", (row) => row.tenant],
      ["period", (row) => row.period],
      ["endpoint", (row) => row.endpoint || "all"],
      ["limit", (row) => money(row.limit_micros, live.currency)],
      ["spent", (row) => money(row.spent_micros, live.currency)],
      ["left", (row) => meter(row.left_micros / Math.max(1, row.limit_micros), money(row.left_micros, live.currency))],
    ], live.budgets.slice(0, 12));
    table(by("caches"), [
      ["cache", (row) => row.cache],
      ["hit ratio", (row) => percent(row.hit_ratio)],
      ["last 5 min", (row) => percent(row.recent_hit_ratio)],
      ["machine time saved", (row) => (row.saved_s === undefined ? "–" : headrace.format(row.saved_s, "s"))],
      ["money saved", (row) => money(row.saved_micros, live.currency)],
      ["entries", (row) => number(row.entries, 0)],
      ["size", (row) => bytes(row.bytes)],
    ], live.caches);
    by("outcomes-section").hidden = !live.outcomes.length;
    table(by("outcomes"), [
      ["outcome", (row) => row.outcome],
      ["model", (row) => row.model],
      ["values", (row) => number(row.count, 0)],
      ["mean", (row) => number(row.mean, 3)],
      ["95 % interval", (row) => (row.mean_low === null ? "–" : `${number(row.mean_low, 3)} to ${number(row.mean_high, 3)}`)],
      ["mean time", (row) => ms(row.mean_e2e_ms)],
      ["cost per unit", (row) => money(row.micros_per_unit, live.currency)],
    ], live.outcomes);
    table(by("ladder"), [
      ["surface", (row) => row.surface],
      ["model", (row) => row.model || "all"],
      ["tenant", (row) => row.tenant || "all"],
      ["step", (row) => `${row.level}: ${row.step}`],
    ], live.ladder, "Nothing is degraded.");
  };

  // Fast mode

  const isFast = (live) => live.fast.switches.some((each) => !each.tenant && each.on !== false);

  const showFast = (live) => {
    const { declared, switches } = live.fast;
    const named = switches.map((each) => each.tenant || "all tenants").join(", ");
    by("fast").textContent = switches.length ? `Fast mode is on for ${named}.`
      : declared ? "Fast mode is off." : "Fast mode is off: the configuration declares nothing in [fast].";
    by("fast-switch").hidden = !declared || !headrace.hasKey();
    by("fast-switch").textContent = isFast(live) ? "Switch fast mode off" : "Switch fast mode on for an hour";
  };

  by("fast-switch").addEventListener("click", async () => {
    const on = isFast(latest);
    try {
      await headrace.request("/admin/v1/fast", on ? { method: "DELETE" } : { method: "PUT", body: { on: true, ttl_s: FAST_S, reason: "dashboard" } });
      by("fast-error").hidden = true;
    } catch (error) {
      by("fast-error").textContent = error.message;
      by("fast-error").hidden = false;
    }
  });

  // The stream of snapshots

  const problem = (text) => {
    by("problem").textContent = text;
    by("problem").hidden = !text;
  };

  const state = (text, kind) => {
    by("state").textContent = text;
    by("state").className = "state " + kind;
  };

  const show = (live) => {
    latest = live;
    const point = pointOf(live);
    if (!points.length) points.push(...historyOf(live));
    points.push(point);
    while (points.length && points[0].at < live.at - SECONDS - 10) points.shift();
    if (paused) return;
    problem("");
    state(live.status === "ready" ? "live" : live.status, "live");
    showTiles(live, point);
    showObjectives(live);
    for (const figure of figures) figure.draw(points.map((each) => ({ at: each.at, values: figure.values(each) })), live.at);
    const focused = document.activeElement?.closest("#slowest");
    if (!focused) showTables(live); // a table that is being used is not replaced
    showFast(live);
  };

  const wait = (milliseconds) => new Promise((resolve) => { setTimeout(resolve, milliseconds); });

  const run = async () => {
    follow?.abort();
    const own = follow = new AbortController();
    while (follow === own) {
      try {
        for await (const data of headrace.events("/admin/v1/live/events", { signal: own.signal })) show(JSON.parse(data));
        state("reconnecting", "lost");
      } catch (error) {
        if (error.name === "AbortError") return;
        state("not connected", "lost");
        if (error.status === 401 || error.status === 403) {
          problem(error.message + " Enter one with the button Key.");
          return;
        }
        if (error.status === 404) {
          problem("This server has keys and no administrator. Give a key admin rights (admin = \"read\") and enter it with the button Key.");
          return;
        }
        if (error.status) problem(error.message);
      }
      await wait(RETRY_MS);
    }
  };

  by("pause").addEventListener("click", () => {
    paused = !paused;
    by("pause").setAttribute("aria-pressed", String(paused));
    by("pause").textContent = paused ? "Go on" : "Pause";
    if (latest !== null) { if (paused) state("paused", ""); else show(latest); }
  });
  by("by").addEventListener("change", () => { if (latest !== null) showTables(latest); });
  headrace.watchKey(run);
  run();
})();
