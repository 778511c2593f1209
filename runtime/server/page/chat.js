// The conversation: it sends messages, shows answers as they come, and stops them.

import { Answer } from "./answer.js";
import { chat } from "./api.js";
import { byId, element } from "./dom.js";

const NEAR_END = 100; // pixels

/** The conversation with one model. */
export class Conversation {
  #messages = [];
  #stopping = null;
  #panel;
  #changed;
  #failed;

  /** panel: follows answers.   changed: called when an answer begins or ends.   failed: takes errors. */
  constructor(panel, changed, failed) {
    [this.#panel, this.#changed, this.#failed] = [panel, changed, failed];
  }

  /** True while an answer is written. */
  get busy() {
    return this.#stopping !== null;
  }

  /** End the answer that is written. */
  stop() {
    this.#stopping?.abort();
  }

  /** Begin anew. */
  clear() {
    this.stop();
    this.#messages = [];
    byId("log").replaceChildren(byId("empty"));
    byId("empty").hidden = false;
  }

  /** Add an element to the log, and show it. */
  say(what) {
    byId("empty").hidden = true;
    keepEnd(() => byId("log").append(what));
  }

  /** Send a message, and show its answer. Returns false if none has begun. fields: of the request, besides messages. */
  async ask(text, fields) {
    const messages = this.#messages;
    const stopping = (this.#stopping = new AbortController());
    messages.push({ role: "user", content: text });
    this.say(element("article", { class: "message user", "aria-label": "You" }, text));
    const answer = new Answer();
    this.say(answer.element);
    this.#panel.begin(answer);
    this.#setBusy(true);
    let end = "stopped";
    try {
      for await (const chunk of chat({ ...fields, messages, stream: true, redraft: { steps: true } }, stopping.signal)) {
        keepEnd(() => answer.add(chunk));
        if (answer.steps.length) this.#panel.update();
        end = chunk.choices[0]?.finish_reason ?? end;
      }
    } catch (error) {
      if (error.name !== "AbortError") {
        end = "failed";
        this.#failed(error);
      }
    }
    keepEnd(() => answer.finish(end));
    if (answer.text) messages.push({ role: "assistant", content: answer.text });
    else messages.pop(); // a message without an answer is not part of the next request
    this.#stopping = null;
    this.#setBusy(false);
    byId("status").textContent = `The answer has ended: ${end}, ${answer.counts.total} tokens.`;
    return end !== "failed" || answer.steps.length > 0;
  }

  #setBusy(busy) {
    byId("log").setAttribute("aria-busy", busy);
    byId("send").hidden = busy;
    byId("stop").hidden = !busy;
    this.#changed();
  }
}

/** Let `change` add to the log. Its end stays in sight if it was there. */
function keepEnd(change) {
  const log = byId("log");
  const seen = log.lastElementChild.getBoundingClientRect().bottom < innerHeight + NEAR_END;
  change();
  if (seen) log.lastElementChild.scrollIntoView({ block: "end" });
}
