// The batch as rows: a row for each request that runs or waits.

import { byId, element } from "./dom.js";

/** Show the batch. most: rows that a request may have in the cache. */
export function showBatch(batch, most) {
  const kv = `${(100 * batch.kv_cache_usage).toFixed(batch.kv_cache_usage < 0.1 ? 1 : 0)} % of rows`;
  const waiting = batch.waiting ? ` · ${batch.waiting} waiting` : "";
  byId("batch-caption").textContent = `${batch.running} of ${batch.slots} slots${waiting} · ${kv}`;
  const rows = batch.requests.map((request) => row(request, most));
  const hidden = batch.running + batch.waiting - batch.requests.length;
  if (hidden > 0) rows.push(element("tr", {}, element("td", { colspan: 6 }, `and ${hidden} more`)));
  if (!rows.length) rows.push(element("tr", { class: "none" }, element("td", { colspan: 6 }, "no requests")));
  byId("rows").replaceChildren(...rows);
}

function row(request, most) {
  const filled = element("td", { class: "rows" }, String(request.rows));
  filled.style.setProperty("--filled", `${Math.min((100 * request.rows) / most, 100)}%`);
  return element(
    "tr",
    { class: request.state },
    element("td", {}, request.replica ? `${request.state} on ${request.replica}` : request.state),
    element("td", { title: request.method }, request.method),
    element("td", {}, String(request.prompt_tokens)),
    element("td", {}, String(request.tokens)),
    element("td", {}, request.steps ? (request.tokens / request.steps).toFixed(2) : "–"),
    filled,
  );
}
