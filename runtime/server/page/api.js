// The server's API: requests with the key, and the events of a stream.

const STORED = "redraft.key";

/** An answer of the server that is an error. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The API key of this tab; null without one. */
export const key = {
  get: () => sessionStorage.getItem(STORED),
  set: (value) => sessionStorage.setItem(STORED, value),
};

async function request(path, options = {}) {
  const given = key.get();
  const headers = { ...options.headers, ...(given ? { Authorization: `Bearer ${given}` } : {}) };
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new ApiError(response.status, body.error?.message ?? `the server answered with status ${response.status}`);
}

/** Return the JSON of a path. Throws ApiError. */
export async function get(path) {
  return (await request(path)).json();
}

/** Yield the chunks of a chat. Throws ApiError, also for an error in the stream. Aborting the signal ends the request. */
export async function* chat(body, signal) {
  const headers = { "Content-Type": "application/json" };
  const response = await request("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(200, chunk.error.message);
    yield chunk;
  }
  throw new ApiError(200, "the connection ended before the answer did");
}

/** Yield the data of server-sent events, however the bytes are cut. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (let read = await reader.read(); !read.done; read = await reader.read()) {
    const lines = (text + read.value).split("\n");
    text = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice("data: ".length);
  }
}
