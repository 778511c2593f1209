// The panel of a step's draft: it follows the answer that is written, until a step is chosen.

import { byId, element } from "./dom.js";
import { Counts, SOURCES } from "./sources.js";
import { draw } from "./tree.js";

/** The panel. It shows one step of one answer. */
export class StepPanel {
  #answer = null;
  #step = 0;
  #follows = false;
  #frame = 0;
  #answers = new WeakMap();

  constructor() {
    byId("before").addEventListener("click", () => this.#choose(this.#answer, this.#step - 1));
    byId("after").addEventListener("click", () => this.#choose(this.#answer, this.#step + 1));
    byId("log").addEventListener("click", (event) => {
      const token = event.target.closest(".token");
      if (token) this.#choose(this.#answers.get(token.closest(".answer")), Number(token.dataset.step));
    });
    byId("log").addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const answer = this.#answers.get(event.target.closest(".answer"));
      if (!move || !answer?.steps.length) return;
      event.preventDefault();
      this.#move(answer, move);
    });
    this.#showLegend(new Counts());
  }

  /** Choose the next or the previous step of an answer; its first or last one if none is chosen. Say which it is. */
  #move(answer, move) {
    const last = answer.steps.length - 1;
    const isChosen = answer === this.#answer && !this.#follows;
    const step = isChosen ? this.#step + move : move > 0 ? 0 : last;
    this.#choose(answer, Math.min(Math.max(step, 0), last));
    answer.element.querySelector(".token.marked")?.scrollIntoView({ block: "nearest" });
    byId("status").textContent = `${byId("place").textContent}, ${byId("draft-caption").textContent}`;
  }

  /** Follow an answer from now on. */
  begin(answer) {
    this.#answer?.mark(null);
    this.#answers.set(answer.element, answer);
    [this.#answer, this.#step, this.#follows] = [answer, 0, true];
    byId("place").textContent = "–";
    byId("before").disabled = byId("after").disabled = true;
  }

  /** Show the latest step at the next frame, if the panel follows. */
  update() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      if (this.#follows) this.#show(this.#answer, this.#answer.steps.length - 1);
      else this.#showPlace();
    });
  }

  #choose(answer, step) {
    if (!answer) return;
    this.#follows = false;
    this.#answer.mark(null);
    this.#show(answer, step);
    answer.mark(step);
  }

  /** Show a step. An answer that is written keeps its latest draft in sight during steps without one. */
  #show(answer, step) {
    if (answer.steps[step] || !this.#follows) draw(answer.steps[step]);
    [this.#answer, this.#step] = [answer, step];
    this.#showPlace();
  }

  #showPlace() {
    const steps = this.#answer.steps.length;
    byId("place").textContent = `step ${this.#step + 1} of ${steps}`;
    byId("before").disabled = this.#step <= 0;
    byId("after").disabled = this.#step >= steps - 1;
    this.#showLegend(this.#answer.counts);
  }

  #showLegend(counts) {
    const whole = counts.total;
    const rows = Object.entries(SOURCES).map(([source, words]) => {
      const share = whole ? `${Math.round((100 * counts.of(source)) / whole)} %` : "";
      const sample = element("span", { class: `token ${source}` }, source);
      const count = element("b", {}, whole ? String(counts.of(source)) : "");
      return element("li", { title: words }, sample, count, element("small", {}, share));
    });
    byId("legend").replaceChildren(...rows);
  }
}
