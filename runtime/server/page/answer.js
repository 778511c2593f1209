// An answer while it is written: its tokens in the style of their sources, and the drafts of its steps.

import { element } from "./dom.js";
import { Counts, SOURCES } from "./sources.js";

/** One answer. `steps` has the draft tree of each step, null for a step without one. `text` is its content so far. */
export class Answer {
  element = element("article", { class: "message answer", "aria-label": "Answer", "aria-describedby": "keys", tabindex: 0 });
  counts = new Counts();
  steps = [];
  text = "";
  #content = element("div", { class: "text" });
  #reasoning = null;
  #figures = element("p", { class: "answer-figures" });
  #began = performance.now();
  #first = null;

  constructor() {
    this.element.append(this.#content, this.#figures);
  }

  /** Add a chunk of the stream. Returns true if it has a step. */
  add(chunk) {
    const [choice] = chunk.choices;
    if (!choice?.redraft) return false;
    this.#first ??= performance.now();
    const step = this.steps.push(choice.redraft.tree ?? null) - 1;
    for (const token of choice.redraft.tokens) this.#addToken(token, step);
    return true;
  }

  #addToken({ ids, sources, content, reasoning_content: reasoning }, step) {
    for (const source of sources) this.counts.add(source);
    if (reasoning) this.#reasoningText().append(token(reasoning, ids, sources, step));
    if (content) {
      this.text += content;
      this.#content.append(token(content, ids, sources, step));
    }
  }

  #reasoningText() {
    if (this.#reasoning === null) {
      this.#reasoning = element("div", { class: "text" });
      const title = element("summary", {}, "Reasoning");
      this.element.prepend(element("details", { class: "reasoning", open: "" }, title, this.#reasoning));
    }
    return this.#reasoning;
  }

  /** Mark the tokens of a step, and no others. */
  mark(step) {
    for (const one of this.element.querySelectorAll(".token.marked")) one.classList.remove("marked");
    if (step === null) return;
    for (const one of this.element.querySelectorAll(`.token[data-step="${step}"]`)) one.classList.add("marked");
  }

  /** Show the figures of the whole answer. end: why it ended. */
  finish(end) {
    const tokens = this.counts.total;
    const now = performance.now();
    const seconds = (now - (this.#first ?? now)) / 1e3;
    const known = [
      `${tokens} tokens`,
      this.steps.length ? `${(tokens / this.steps.length).toFixed(2)} per step` : null,
      seconds > 0.05 ? `${(tokens / seconds).toFixed(1)} per second` : null,
      this.#first ? `first after ${((this.#first - this.#began) / 1e3).toFixed(2)} s` : null,
      end,
    ];
    this.#figures.textContent = known.filter((one) => one !== null).join(" · ");
  }
}

/** Return the element of a text that some tokens complete. Its style is that of the last one. */
function token(text, ids, sources, step) {
  const source = sources.at(-1) ?? "plain";
  const which = ids.length === 1 ? `token ${ids[0]}` : `tokens ${ids.join(", ")}`;
  const title = `${source}: ${SOURCES[source]} (${which}, step ${step + 1})`;
  return element("span", { class: `token ${source}`, title, "data-step": step }, text);
}
