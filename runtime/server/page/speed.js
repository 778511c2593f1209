// Tokens per second of all requests, next to what plain decoding would give, from pairs of readings of /batch.

import { byId, shape } from "./dom.js";

const WINDOW_MS = 3000;
const SHOWN_MS = 60000;
const [WIDTH, HEIGHT] = [240, 44];

/** The rates of the last minute. */
export class Speed {
  #readings = [];
  #rates = [];
  #measured = false; // since requests began; the last reading, after they have ended, counts idle time

  /** Add a reading of /batch at a time in milliseconds, and show the rates. */
  add(batch, at) {
    const latest = this.#readings.at(-1)?.batch;
    if (latest && batch.tokens < latest.tokens) this.#readings = []; // the server began anew
    this.#readings.push({ batch, at });
    while (this.#readings.length > 2 && this.#readings[1].at < at - WINDOW_MS) this.#readings.shift();
    const busy = batch.running > 0 || batch.waiting > 0;
    if (busy || !this.#measured) this.#measure(at);
    if (!busy) [this.#readings, this.#measured] = [[{ batch, at }], false];
    byId("speed-state").textContent = busy ? "all requests" : this.#rates.length ? "latest, now idle" : "idle";
    this.#drawChart(at);
  }

  #measure(now) {
    const [first, last] = [this.#readings[0], this.#readings.at(-1)];
    const tokens = last.batch.tokens - first.batch.tokens;
    if (!tokens) return;
    this.#measured = true;
    const rate = (1e3 * tokens) / (last.at - first.at);
    const spent = last.batch.decode_ms - first.batch.decode_ms;
    const gain = spent > 0 ? (last.batch.plain_decode_ms - first.batch.plain_decode_ms) / spent : null;
    const plain = gain ? rate / gain : null;
    this.#rates.push({ at: now, rate, plain });
    byId("rate").textContent = rate.toFixed(1);
    byId("plain").textContent = plain === null ? "–" : plain.toFixed(1);
    byId("gain").textContent = gain === null ? "–" : `${gain.toFixed(2)}×`;
  }

  #drawChart(now) {
    this.#rates = this.#rates.filter((one) => one.at > now - SHOWN_MS);
    const most = Math.max(1, ...this.#rates.map((one) => Math.max(one.rate, one.plain ?? 0)));
    byId("chart").replaceChildren(
      ...["plain", "rate"].map((name) => {
        const points = this.#rates.filter((one) => one[name] !== null).map((one) => {
          const x = WIDTH * (1 - (now - one.at) / SHOWN_MS);
          return `${x.toFixed(1)},${(HEIGHT - 2 - (HEIGHT - 4) * (one[name] / most)).toFixed(1)}`;
        });
        return shape("polyline", { class: name, points: points.join(" ") });
      }),
    );
  }
}
