// The draft tree of a step as a drawing: the accepted path is the first line, other branches hang below it.

import { byId, element, shape, visible } from "./dom.js";

const ROW = 28;
const HEIGHT = 20;
const GAP = 18;
const PADDING = 7;

const PEN = document.createElement("canvas").getContext("2d");

/** Draw the tree of a step; null for a step without a draft. */
export function draw(tree) {
  byId("tree").replaceChildren(tree ? drawing(nodesOf(tree), summary(tree)) : element("p", {}, "The step had no draft."));
  byId("draft-caption").textContent = tree ? summary(tree) : "plain step";
}

function summary(tree) {
  const drafted = tree.tokens.length - 1;
  const by = tree.drafters.length ? tree.drafters.join(" and ") : "lookup";
  return `${by}: ${tree.path.length} of ${drafted} accepted`;
}

/** Return the nodes of a tree with their places. The verifier's token is the first child of the last accepted node. */
function nodesOf(tree) {
  const path = new Set(tree.path);
  const nodes = tree.tokens.map((id, place) => ({
    id,
    text: tree.texts[place],
    source: place ? tree.sources[place] : "root",
    prob: place ? tree.probs[place] : null,
    accepted: place === 0 || path.has(place),
    children: [],
  }));
  for (const [place, node] of nodes.entries()) if (place) nodes[tree.parents[place]].children.push(node);
  for (const node of nodes) node.children.sort((a, b) => b.accepted - a.accepted || b.prob - a.prob);
  if (tree.bonus) {
    const bonus = { ...tree.bonus, source: "bonus", prob: null, accepted: true, children: [] };
    nodes[tree.path.at(-1) ?? 0].children.unshift(bonus);
    nodes.push(bonus);
  }
  lines(nodes[0]);
  columns(nodes);
  return nodes;
}

/** Give every node its level and its line: the first child is on the line of its parent. */
function lines(root) {
  let last = -1;
  const open = [{ node: root, level: 0, line: null }];
  while (open.length) {
    const { node, level, line } = open.pop();
    node.level = level;
    node.line = line ?? ++last;
    const [first, ...others] = node.children;
    for (const child of others.reverse()) open.push({ node: child, level: level + 1, line: null });
    if (first) open.push({ node: first, level: level + 1, line: node.line });
  }
}

/** Give every node its label and its place on its line: levels are as wide as their longest label. */
function columns(nodes) {
  const widths = [];
  PEN.font = `600 12px ${getComputedStyle(document.body).getPropertyValue("--mono")}`;
  for (const node of nodes) {
    node.label = visible(node.text, 14) || `#${node.id}`;
    node.width = PEN.measureText(node.label).width + 2 * PADDING;
    widths[node.level] = Math.max(widths[node.level] ?? 0, node.width);
  }
  const starts = widths.map((_, level) => widths.slice(0, level).reduce((sum, width) => sum + width + GAP, 1));
  for (const node of nodes) node.x = starts[node.level];
}

function drawing(nodes, label) {
  const width = Math.max(...nodes.map((node) => node.x + node.width)) + 2;
  const height = (Math.max(...nodes.map((node) => node.line)) + 1) * ROW;
  const edges = nodes.flatMap((node) => node.children.map((child) => edge(node, child)));
  const path = nodes.filter((node) => node.accepted && node.source !== "root").map((node) => node.text);
  return shape(
    "svg",
    { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${label}. Text: ${path.join("")}` },
    ...edges.filter((one) => !one.classList.contains("accepted")),
    ...edges.filter((one) => one.classList.contains("accepted")),
    ...nodes.map(box),
  );
}

const middle = (node) => node.line * ROW + ROW / 2;

function edge(parent, child) {
  const [x, y, toX, toY] = [parent.x + parent.width, middle(parent), child.x, middle(child)];
  const bend = x + GAP / 2;
  const line = y === toY ? `M${x} ${y}H${toX}` : `M${x} ${y}C${bend} ${y} ${bend - 4} ${toY} ${bend + 6} ${toY}H${toX}`;
  return shape("path", { d: line, class: child.accepted ? "edge accepted" : "edge" });
}

function box(node) {
  const y = middle(node) - HEIGHT / 2;
  const { x, width } = node;
  const state = node.accepted ? "accepted" : "rejected";
  const prob = node.prob === null ? "" : `, probability ${node.prob}`;
  const parts = [
    shape("title", {}, `${JSON.stringify(node.text)}: ${node.source}, ${state}${prob} (token ${node.id})`),
    shape("rect", { x, y, width, height: HEIGHT, rx: 4 }),
    shape("text", { x: x + PADDING, y: y + 14 }, node.label),
  ];
  if (node.prob !== null) {
    const share = Math.max(node.prob * (width - 8), 1);
    parts.push(shape("rect", { class: "prob", x: x + 4, y: y + HEIGHT - 3, width: share, height: 2 }));
  }
  return shape("g", { class: `node ${node.source} ${state}` }, ...parts);
}
