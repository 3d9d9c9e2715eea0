// The playground: asks one or two models at once and shows how each answer came about.
"use strict";
(() => {
  const by = (id) => document.getElementById(id);
  const element = (name, className, text) => {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const figure = (value, digits = 1) => value.toLocaleString("en", { maximumFractionDigits: digits });
  const panes = ["a", "b"].map((name) => ({
    root: by("pane-" + name), title: by("pane-" + name).querySelector("h2"),
    turns: by("pane-" + name).querySelector(".turns"), select: by("model-" + name), messages: [],
  }));
  let running = null; // the AbortController of the answers under way
  let language = "curl";

  // Settings

  const sources = () => by("sources").value.split(/\n\s*\n/).map((text) => text.trim()).filter(Boolean)
    .map((text, place) => ({ id: String(place + 1), text }));

  const tools = () => {
    const text = by("tools").value.trim();
    const error = by("tools-error");
    error.hidden = true;
    if (!text) return null;
    try {
      const found = JSON.parse(text);
      if (Array.isArray(found)) return found;
      error.textContent = "Tools must be a list: [{\"type\": \"function\", \"function\": {...}}].";
    } catch (problem) {
      error.textContent = "Tools are not valid JSON: " + problem.message;
    }
    error.hidden = false;
    throw new Error("tools");
  };

  const requestOf = (pane, messages) => {
    const system = by("system").value.trim();
    const body = {
      model: pane.select.value,
      messages: system ? [{ role: "system", content: system }, ...messages] : messages,
      max_tokens: Number(by("max-tokens").value) || 512,
      temperature: Number(by("temperature").value),
      stream: true,
      stream_options: { include_usage: true },
    };
    for (const name of ["surface", "cache", "profile"]) if (by(name).value) body[name] = by(name).value;
    const given = sources();
    if (given.length) body.sources = given;
    const functions = tools();
    if (functions !== null) body.tools = functions;
    return body;
  };

  const showSnippet = () => {
    let body;
    try {
      body = requestOf(panes[0], [...panes[0].messages, { role: "user", content: by("message").value || "Hello!" }]);
    } catch { return; }
    by("snippet").textContent = headrace.snippets[language](location.origin, body, headrace.hasKey());
    by("snippet").setAttribute("aria-labelledby", "tab-" + language);
    for (const name of ["curl", "python"]) by("tab-" + name).setAttribute("aria-selected", String(name === language));
  };

  const showPanes = () => {
    const two = panes[1].select.value !== "";
    panes[1].root.hidden = !two;
    by("panes").classList.toggle("two", two);
    for (const pane of panes) pane.title.textContent = pane.select.value;
  };

  // What may be chosen instead of the first model, with what was measured of it.
  const showOptions = async () => {
    const model = panes[0].select.value;
    if (!by("options").open || !model) return;
    let items;
    try {
      const { data } = await headrace.request("/v1/models/" + encodeURI(model) + "/options");
      items = data.map((option) => [option.option + " (" + option.kind + ")", option.summary]);
    } catch (error) {
      items = [["Not known", error.message]];
    }
    if (panes[0].select.value !== model) return;
    by("option-list").replaceChildren(...items.map(([name, text]) => {
      const item = element("li");
      item.append(element("strong", "", name), ": " + text);
      return item;
    }));
  };

  const loadModels = async () => {
    let models;
    try {
      models = (await headrace.request("/v1/models")).data;
    } catch (error) {
      by("announce").textContent = error.message;
      say(panes[0], "error", error.status === 401 ? "The server needs a key. Enter one with the button Key." : error.message);
      if (error.status === 401) openKey();
      return;
    }
    for (const [place, pane] of panes.entries()) {
      const before = pane.select.value;
      pane.select.replaceChildren(...(place ? [new Option("nothing", "")] : []), ...models.map((model) => new Option(model.id, model.id)));
      if (models.some((model) => model.id === before)) pane.select.value = before;
    }
    showPanes();
    showSnippet();
  };

  // Answers

  const say = (pane, kind, text) => {
    const turn = element("article", "turn " + kind);
    turn.append(element("div", kind === "error" ? "error" : "text", text));
    pane.turns.append(turn);
    turn.scrollIntoView({ block: "nearest" });
    return turn;
  };

  // Text with its fenced code set apart.
  const write = (target, text) => {
    const parts = text.split(/^```[^\n]*\n?/m);
    target.replaceChildren(...parts.map((part, place) => (place % 2 ? element("pre", "", part) : document.createTextNode(part))));
  };

  const disclosure = (title, content, open = false) => {
    const made = element("details");
    made.open = open;
    made.append(element("summary", "", title), content);
    return made;
  };

  const STAGES = [["queue", "queue_ms"], ["prefill", "prefill_ms"], ["decode", "decode_ms"]];

  const speed = ({ first, last }, usage) =>
    usage && last > first && usage.completion_tokens > 1 ? (usage.completion_tokens - 1) / ((last - first) / 1e3) : null;

  const showFigures = (turn, timing, usage, own) => {
    const rows = element("dl", "figures");
    const put = (name, value) => { rows.append(element("dt", "", name), element("dd", "", value)); };
    if (timing.first) put("first token", figure(timing.first - timing.began, 0) + " ms");
    const pace = speed(timing, usage);
    if (pace !== null) put("tokens/s", figure(pace));
    put("total", figure(timing.last - timing.began, 0) + " ms");
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens;
      put("prompt", usage.prompt_tokens + (cached ? ` (${cached} cached)` : ""));
      put("answer", String(usage.completion_tokens));
    }
    if (own?.cache) put("cache", typeof own.cache === "string" ? own.cache : JSON.stringify(own.cache));
    turn.append(rows);
    const stages = STAGES.filter(([, name]) => own?.[name] > 0).map(([name, field]) => [name, own[field]]);
    const known = stages.reduce((sum, [, ms]) => sum + ms, 0);
    if (known > 0) {
      const rest = timing.last - timing.began - known;
      if (rest > 0) stages.push(["server and network", rest]);
      const bar = element("div", "stages");
      const names = element("div", "stage-names");
      for (const [place, [name, ms]] of stages.entries()) {
        const span = element("span", "s" + place);
        span.style.flexGrow = String(ms);
        bar.append(span);
        const label = element("span");
        label.append(element("span", "swatch s" + place), `${name} ${figure(ms, 1)} ms`);
        names.append(label);
      }
      bar.setAttribute("role", "img");
      bar.setAttribute("aria-label", stages.map(([name, ms]) => `${name} ${figure(ms, 1)} ms`).join(", "));
      turn.append(bar, names);
    }
  };

  const answer = async (pane, body, signal) => {
    const turn = say(pane, "running", "");
    const text = turn.querySelector(".text");
    const timing = { began: performance.now(), first: 0, last: 0 };
    const live = turn.appendChild(element("p", "hint"));
    const calls = new Map();
    const details = { reasoning: null, calls: null };
    let content = "", reasoning = "", usage = null, own = null, finish = null;
    let drawn = true;
    const draw = () => {
      drawn = true;
      write(text, content);
      const pace = speed(timing, usage);
      live.textContent = pace === null ? "" : figure(pace) + " tokens/s";
      if (reasoning) {
        details.reasoning ??= turn.insertBefore(disclosure("Reasoning", element("pre")), text);
        details.reasoning.querySelector("pre").textContent = reasoning;
      }
      if (calls.size) {
        details.calls ??= turn.appendChild(disclosure("Tool calls", element("pre"), true));
        details.calls.querySelector("pre").textContent = [...calls.values()].map((call) => `${call.name}(${call.arguments})`).join("\n");
      }
    };
    const drawSoon = () => { if (drawn) { drawn = false; requestAnimationFrame(draw); } };
    try {
      const counted = { ...body, stream_options: { include_usage: true, continuous_usage_stats: true } };
      for await (const data of headrace.events("/v1/chat/completions", { body: counted, signal })) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new headrace.ServerError(500, chunk.error.message);
        if (chunk.usage) usage = chunk.usage;
        if (chunk.headrace) own = chunk.headrace;
        const choice = chunk.choices?.[0];
        if (!choice) continue;
        const delta = choice.delta ?? {};
        if (delta.content || delta.reasoning_content || delta.tool_calls) {
          timing.last = performance.now();
          timing.first ||= timing.last;
        }
        content += delta.content ?? "";
        reasoning += delta.reasoning_content ?? "";
        for (const part of delta.tool_calls ?? []) {
          const call = calls.get(part.index) ?? { name: "", arguments: "" };
          call.name += part.function?.name ?? "";
          call.arguments += part.function?.arguments ?? "";
          calls.set(part.index, call);
        }
        finish = choice.finish_reason ?? finish;
        drawSoon();
      }
    } catch (error) {
      if (error.name === "AbortError") finish = "stopped";
      else turn.append(element("p", "error", error.message));
    }
    draw();
    timing.last ||= performance.now();
    turn.classList.remove("running");
    live.remove();
    if (finish && finish !== "stop") turn.append(element("p", "hint", "ended: " + finish));
    const cited = own?.citations ?? [];
    const found = own?.sources ?? []; // by a pipeline
    const numbers = new Set(cited.map((each) => each.number));
    if (cited.length) {
      const list = element("ul");
      const given = new Map((body.sources ?? []).map((source) => [source.id, source.text]));
      for (const { number, id } of found.length ? found.filter((each) => numbers.has(each.number)) : cited) {
        const source = found.find((each) => each.number === number);
        const text = source ? [source.source, source.heading, source.text].filter(Boolean).join(" — ") : given.get(id) ?? id;
        list.append(element("li", "", `[${number}] ${text}`));
      }
      turn.append(disclosure(`Sources (${list.children.length})`, list, true));
    } else if (found.length) {
      const list = element("ul");
      for (const { number, source, heading } of found) list.append(element("li", "", `[${number}] ${[source, heading].filter(Boolean).join(" — ")}`));
      turn.append(disclosure(`Found and not cited (${found.length})`, list));
    }
    showFigures(turn, timing, usage, own);
    if (own) turn.append(disclosure("What the server says", element("pre", "", JSON.stringify({ usage, headrace: own }, null, 2))));
    return content;
  };

  const ask = async () => {
    const question = by("message").value.trim();
    if (!question || running) return;
    const asked = panes.filter((pane) => pane.select.value);
    let bodies;
    try {
      bodies = asked.map((pane) => requestOf(pane, [...pane.messages, { role: "user", content: question }]));
    } catch { return; }
    by("message").value = "";
    running = new AbortController();
    by("send").disabled = true;
    by("stop").disabled = false;
    by("announce").textContent = "The answer is being written.";
    const answers = asked.map(async (pane, place) => {
      say(pane, "user", question);
      const text = await answer(pane, bodies[place], running.signal);
      pane.messages.push({ role: "user", content: question }, { role: "assistant", content: text });
      return text;
    });
    const texts = await Promise.all(answers);
    running = null;
    by("send").disabled = false;
    by("stop").disabled = true;
    by("announce").textContent = "The answer is complete. " + texts[0].slice(0, 2000);
    by("message").focus();
    showSnippet();
  };

  by("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
  by("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
  });
  by("stop").addEventListener("click", () => running?.abort());
  by("clear").addEventListener("click", () => {
    running?.abort();
    for (const pane of panes) { pane.messages = []; pane.turns.replaceChildren(); }
    by("message").focus();
  });
  by("settings").addEventListener("submit", (event) => event.preventDefault());
  by("settings").addEventListener("input", () => { showPanes(); showSnippet(); });
  by("options").addEventListener("toggle", showOptions);
  panes[0].select.addEventListener("input", showOptions);
  by("message").addEventListener("input", showSnippet);
  for (const name of ["curl", "python"]) by("tab-" + name).addEventListener("click", () => { language = name; showSnippet(); });
  by("copy").addEventListener("click", async () => {
    await navigator.clipboard.writeText(by("snippet").textContent);
    by("announce").textContent = "Copied.";
  });
  const openKey = headrace.watchKey(loadModels);
  loadModels();
})();
