// Talks to the server: the key of this tab, JSON requests, and streams of server-sent events.
"use strict";
window.headrace ??= {};
(() => {
  const KEY = "headrace-key";
  const kept = () => { try { return sessionStorage.getItem(KEY) ?? ""; } catch { return ""; } };
  const keep = (value) => {
    try { if (value) sessionStorage.setItem(KEY, value); else sessionStorage.removeItem(KEY); } catch { /* for this page */ }
  };

  const headers = (more = {}) => {
    const key = kept();
    return key ? { ...more, authorization: "Bearer " + key } : more;
  };

  class ServerError extends Error {
    constructor(status, message) { super(message); this.status = status; }
  }

  const failure = async (response) => {
    let message = `The server answered ${response.status}.`;
    try { message = (await response.json()).error?.message ?? message; } catch { /* no JSON */ }
    return new ServerError(response.status, message);
  };

  const reached = async (path, options) => {
    try {
      return await fetch(path, options);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError(0, "The server does not answer.");
    }
  };

  const request = async (path, { method = "GET", body, signal } = {}) => {
    const options = { method, signal, headers: headers(body === undefined ? {} : { "content-type": "application/json" }) };
    if (body !== undefined) options.body = JSON.stringify(body);
    const response = await reached(path, options);
    if (!response.ok) throw await failure(response);
    return response.status === 204 ? null : response.json();
  };

  // Yield the data of each event. The body is posted, if there is one.
  async function* events(path, { body, signal } = {}) {
    const options = { signal, headers: headers({ accept: "text/event-stream" }) };
    if (body !== undefined) {
      options.method = "POST";
      options.headers["content-type"] = "application/json";
      options.body = JSON.stringify(body);
    }
    const response = await reached(path, options);
    if (!response.ok) throw await failure(response);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    try {
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        rest += value;
        const parts = rest.split("\n\n");
        rest = parts.pop();
        for (const part of parts) {
          const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
          if (data.length) yield data.join("\n");
        }
      }
    } finally {
      reader.cancel().catch(() => {});
    }
  }

  // The dialog for the key. `changed` is called when another key is used.
  const watchKey = (changed) => {
    const dialog = document.getElementById("key-dialog");
    const field = document.getElementById("key");
    const open = () => { field.value = kept(); dialog.returnValue = "cancel"; dialog.showModal(); };
    document.getElementById("key-button").addEventListener("click", open);
    dialog.addEventListener("close", () => {
      if (dialog.returnValue === "save") keep(field.value.trim());
      else if (dialog.returnValue === "forget") keep("");
      else return;
      field.value = "";
      changed();
    });
    return open;
  };

  Object.assign(headrace, { ServerError, request, events, watchKey, hasKey: () => kept() !== "" });
})();
