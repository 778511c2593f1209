// The page: the model and its options, the API key, and the readings of the server.

import { ApiError, get, key } from "./api.js";
import { showBatch } from "./batch.js";
import { Conversation } from "./chat.js";
import { byId, element } from "./dom.js";
import { Speed } from "./speed.js";
import { StepPanel } from "./steps.js";

const BUSY_MS = 500;
const IDLE_MS = 2000;

const speed = new Speed();
const conversation = new Conversation(new StepPanel(), poll, showError);
let model = null;
let timer = 0;
let hasFailed = false;

/** Read the model, again and again while the server cannot answer, and then the batch from time to time. */
async function begin() {
  clearTimeout(timer);
  try {
    [model] = (await get("v1/models")).data;
  } catch (error) {
    const isRefused = error instanceof ApiError && error.status < 500;
    if (isRefused || !hasFailed) showError(error);
    hasFailed = !isRefused;
    if (hasFailed) timer = setTimeout(begin, IDLE_MS);
    return;
  }
  byId("model").textContent = model.id;
  document.title = `${model.id} · redraft`;
  const words = model.methods.map((word) => element("option", { value: word }, word));
  byId("method").replaceChildren(element("option", { value: "" }, `${model.default_method} (default)`), ...words);
  poll();
}

/** Show an error. One of the key asks for another one. */
function showError(error) {
  if (error instanceof ApiError && error.status === 401) {
    askForKey();
    return;
  }
  const text = error instanceof TypeError ? "The server cannot be reached." : error.message;
  conversation.say(element("p", { class: "message error", role: "alert" }, text));
}

/** Read the batch now, and again later: sooner while requests run, and never while nobody sees the page. */
async function poll() {
  if (!model) return;
  clearTimeout(timer);
  if (document.hidden) return;
  let wait = IDLE_MS;
  try {
    const batch = await get("batch");
    speed.add(batch, performance.now());
    showBatch(batch, model.max_model_len);
    if (batch.running || batch.waiting || conversation.busy) wait = BUSY_MS;
  } catch {
    byId("batch-caption").textContent = "the server does not answer";
  }
  clearTimeout(timer);
  timer = setTimeout(poll, wait);
}

/** Send the message. If no answer begins, the message goes back into its box. */
async function send() {
  const text = byId("message").value;
  if (!text.trim() || conversation.busy || !model) return;
  byId("message").value = "";
  grow();
  const hasBegun = await conversation.ask(text, { model: model.id, ...options() });
  if (hasBegun || byId("message").value) return;
  byId("message").value = text;
  grow();
}

/** Return the fields of a request that the options at the top ask for. Options that are left empty have none. */
function options() {
  const [method, nodes, temperature] = [byId("method").value, byId("nodes").value, byId("temperature").value];
  const drafts = {
    ...(method && { method }),
    ...(nodes && { num_speculative_tokens: Number(nodes), controller: "fixed" }),
  };
  return {
    ...(Object.keys(drafts).length && { speculative_config: drafts }),
    ...(temperature && { temperature: Number(temperature) }),
  };
}

/** Make the message's box as high as its text. */
function grow() {
  const box = byId("message");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

function askForKey() {
  byId("key").hidden = false;
  byId("key-why").textContent = key.get()
    ? "The server does not know this key."
    : "This server needs an API key. It stays in this tab.";
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

byId("key").addEventListener("click", askForKey);
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("key-form").addEventListener("submit", () => {
  key.set(byId("key-input").value.trim());
  byId("key-input").value = "";
  begin();
});
byId("options").addEventListener("submit", (event) => event.preventDefault());
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("message").addEventListener("input", grow);
byId("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
byId("stop").addEventListener("click", () => conversation.stop());
byId("new").addEventListener("click", () => {
  conversation.clear();
  byId("message").focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("key-dialog").open) conversation.stop();
});
document.addEventListener("visibilitychange", poll);
begin();
