// Writes a request to the chat API as a curl command and as Python. Keys are named, never shown.
"use strict";
window.headrace ??= {};
(() => {
  const indented = (value) => JSON.stringify(value, null, 2);

  const curl = (origin, body, hasKey) => [
    `curl ${origin}/v1/chat/completions \\`,
    ...(hasKey ? ['  -H "authorization: Bearer $HEADRACE_API_KEY" \\'] : []),
    "  -H 'content-type: application/json' \\",
    `  -d '${indented(body).replaceAll("'", "'\\''")}'`,
  ].join("\n");

  const literal = (value) => {
    if (value === null || value === undefined) return "None";
    if (value === true) return "True";
    if (value === false) return "False";
    if (Array.isArray(value)) return "[" + value.map(literal).join(", ") + "]";
    if (typeof value === "object") {
      return "{" + Object.entries(value).map(([name, each]) => JSON.stringify(name) + ": " + literal(each)).join(", ") + "}";
    }
    return JSON.stringify(value);
  };

  // Parameters that the openai package knows; the others go into extra_body.
  const KNOWN = new Set(["model", "messages", "temperature", "max_tokens", "stream", "stream_options", "tools"]);

  const python = (origin, body, hasKey) => {
    const own = Object.entries(body).filter(([name]) => !KNOWN.has(name));
    const lines = [
      ...(hasKey ? ["import os", ""] : []),
      "from openai import OpenAI",
      "",
      `client = OpenAI(base_url="${origin}/v1", api_key=${hasKey ? 'os.environ["HEADRACE_API_KEY"]' : '"none"'})`,
      "stream = client.chat.completions.create(",
      ...Object.entries(body).filter(([name]) => KNOWN.has(name)).map(([name, value]) => `    ${name}=${literal(value)},`),
      ...(own.length ? [`    extra_body=${literal(Object.fromEntries(own))},`] : []),
      ")",
      "for chunk in stream:",
      "    if chunk.choices:",
      '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
    ];
    return lines.join("\n");
  };

  headrace.snippets = { curl, python };
})();
