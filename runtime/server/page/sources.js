// The sources of tokens: their words and their order. style.css has their colours and lines.

export const SOURCES = {
  drafter: "accepted from a drafter’s new draft",
  resampled: "accepted from a drafter’s resampled draft",
  lookup: "accepted from a lookup: n-grams, suffixes or a prediction",
  bonus: "the model’s own token after a draft",
  plain: "the model’s own token of a step without a draft",
};

/** Counts of an answer's tokens by source. */
export class Counts {
  #of = {};

  add(source) {
    this.#of[source] = (this.#of[source] ?? 0) + 1;
  }

  of(source) {
    return this.#of[source] ?? 0;
  }

  get total() {
    return Object.values(this.#of).reduce((sum, count) => sum + count, 0);
  }
}
