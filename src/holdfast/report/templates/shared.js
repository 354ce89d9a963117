"use strict";
// What the pages share: elements, numbers, tooltips, keys, scales, sorted tables, light and dark.

const byId = (id) => document.getElementById(id);

// -- elements; text is always set as text, never parsed

function add(parent, name, attributes = {}, text = null) {
  const svg = parent.namespaceURI === "http://www.w3.org/2000/svg" || name === "svg";
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  parent.append(node);
  return node;
}
const clear = (node) => (node.replaceChildren(), node);

// -- numbers: three digits; bounds are rounded up and attained values down

function digits(value, round = Math.round) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const power = Math.floor(Math.log10(Math.abs(value))), scale = 10 ** (2 - power);
  const fuzz = round === Math.ceil ? 1 - 1e-12 : round === Math.floor ? 1 + 1e-12 : 1;
  const rounded = Number((round(value * scale * fuzz) / scale).toPrecision(3));
  const size = Math.abs(rounded);
  if (size >= 1e-3 && size < 1e5) return size < 1000 ? rounded.toPrecision(3) : String(rounded);
  const [head, tail] = rounded.toExponential().split("e");
  const raised = [...String(Number(tail))].map((c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c])).join("");
  return head === "1" ? `10${raised}` : `${head}×10${raised}`;
}
const short = (value) => digits(value).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
const up = (value) => digits(value, Math.ceil), down = (value) => digits(value, Math.floor);
const percent = (share) => (share >= 0.0995 ? Math.round(100 * share) : (100 * share).toPrecision(2)) + " %";
const largest = (row) => row.reduce((best, value, i) => (value > row[best] ? i : best), 0);

// -- tooltips: for the pointer and for the keyboard

const tip = byId("tip");
let explained = null;
function explain(node, text) {
  node.dataset.tip = text;
  if (!node.hasAttribute("aria-label")) node.setAttribute("aria-label", text.replace(/\n/g, "; "));
}
function showTip(node) {
  explained = node;
  tip.textContent = node.dataset.tip;
  tip.hidden = false;
  const box = node.getBoundingClientRect(), own = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left + box.width / 2 - own.width / 2), innerWidth - own.width - 8);
  const above = box.top - own.height - 8;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 4 ? above : Math.min(box.bottom + 8, innerHeight - own.height - 4)}px`;
}
const hideTip = () => (tip.hidden = true);
const tipOf = (event) => (event.target.closest ? event.target.closest("[data-tip]") : null);
for (const kind of ["mouseover", "focusin"])
  document.addEventListener(kind, (event) => (tipOf(event) ? showTip(tipOf(event)) : hideTip()));
for (const kind of ["mouseout", "focusout"]) document.addEventListener(kind, hideTip);
document.addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
addEventListener("scroll", () => tip.hidden || showTip(explained), { passive: true }); // focus scrolls, too

// One stop for Tab in each group; the arrow keys move inside it.
function keys(nodes, columns = 1, start = 0) {
  nodes.forEach((node, i) => {
    node.setAttribute("tabindex", i === start ? 0 : -1);
    node.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
      if (event.key === "Enter" || event.key === " ") node.dispatchEvent(new MouseEvent("click", { bubbles: true }));
      else if (!step || !nodes[i + step]) return;
      else {
        node.setAttribute("tabindex", -1);
        nodes[i + step].setAttribute("tabindex", 0);
        nodes[i + step].focus();
      }
      event.preventDefault();
    });
  });
}

// -- scales and charts

function ticks(low, high, log) {
  if (log) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const digit of high / low < 300 ? [1, 2, 5] : [1]) found.push(digit * 10 ** power);
    const kept = found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
    const every = Math.ceil(kept.length / 9);
    return kept.filter((_, i) => i % every === 0);
  }
  const raw = high / 5, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  return Array.from({ length: Math.floor(high / step + 1.001) }, (_, i) => i * step);
}

function axis(values, log) {
  const seen = values.filter((value) => value > 0 && Number.isFinite(value));
  if (!seen.length) return { low: 0, high: 1, at: () => 0, ticks: [] };
  let low = Math.min(...seen), high = Math.max(...seen);
  if (log) { low /= 1.25; high *= 1.25; } else { low = 0; high *= 1.06; }
  const share = (v) => (log ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low));
  return { low, high, log, at: share, ticks: ticks(low, high, log) };
}

function frame(id, label, y, height, yTitle) {
  const box = clear(byId(id)), width = Math.max(260, box.clientWidth), margin = { left: 56, right: 14, top: 22, bottom: 40 };
  const svg = add(box, "svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label });
  add(svg, "title", {}, label);
  const place = (share) => height - margin.bottom - share * (height - margin.top - margin.bottom);
  add(svg, "text", { x: 0, y: 11 }, yTitle);
  for (const tick of y.ticks) {
    add(svg, "line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: place(y.at(tick)), y2: place(y.at(tick)) });
    add(svg, "text", { x: margin.left - 8, y: place(y.at(tick)) + 4, "text-anchor": "end" }, short(tick));
  }
  add(svg, "line", { class: "axis", x1: margin.left, x2: width - margin.right, y1: height - margin.bottom, y2: height - margin.bottom });
  return { svg, width, height, margin, inner: width - margin.left - margin.right, y: (value) => place(y.at(value)) };
}

// -- tables that a click on a heading sorts

// columns: {title, value, show}; sorting: {column, ascending}, kept by the caller. A click on one of the first `textual`
// headings sorts upwards first, on another one downwards. dress(row, item, place) finishes a row.
function sortedTable(id, columns, items, sorting, textual, dress = () => {}) {
  const again = () => sortedTable(id, columns, items, sorting, textual, dress);
  const head = add(clear(document.querySelector(`#${id} thead`)), "tr");
  columns.forEach(({ title }, i) => {
    const sorted = i === sorting.column ? (sorting.ascending ? "ascending" : "descending") : "none";
    const button = add(add(head, "th", { scope: "col", "aria-sort": sorted }), "button", { type: "button" }, title);
    add(button, "span", { class: "arrow", "aria-hidden": "true" }, { ascending: "▲", descending: "▼", none: "" }[sorted]);
    button.addEventListener("click", () => {
      sorting.ascending = i === sorting.column ? !sorting.ascending : i < textual;
      sorting.column = i;
      again();
      document.querySelectorAll(`#${id} th button`)[i].focus();
    });
  });
  const { value } = columns[sorting.column], sign = sorting.ascending ? 1 : -1;
  const order = items.map((item, i) => ({ item, i, key: value(item) }));
  order.sort((p, q) => (p.key === null) - (q.key === null) || (p.key < q.key ? -sign : p.key > q.key ? sign : p.i - q.i));
  const body = clear(document.querySelector(`#${id} tbody`));
  for (const { item, i } of order) {
    const row = add(body, "tr");
    for (const { value: pick, show } of columns) add(row, "td", {}, show(pick(item)));
    dress(row, item, i);
  }
}

// -- light and dark

const theme = byId("theme"), dark = matchMedia("(prefers-color-scheme: dark)");
theme.addEventListener("click", () => {
  const now = document.documentElement.dataset.theme || (dark.matches ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
});
