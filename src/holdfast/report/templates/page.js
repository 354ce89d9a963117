(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const state = { input: 0, layer: 0, eps: Math.min(1, data.eps.length - 1), quantity: 0 };

  // -- lines and their marks

  function mark(parent, kind, x, y) {
    const shapes = { bound: "M0-6 6 0 0 6-6 0Z", attack: "M0-4 3.8 3-3.8 3Z", upper: "M-4-4H4V4H-4Z" };
    const attributes = { class: `mark ${kind}`, transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` };
    return shapes[kind] ? add(parent, "path", { ...attributes, d: shapes[kind] }) : add(parent, "circle", { ...attributes, r: 6.5 });
  }

  function legend(id, series) {
    const box = clear(byId(id));
    for (const { kind, title } of series) {
      const item = add(box, "span");
      const svg = add(item, "svg", { width: 34, height: 14, "aria-hidden": "true" });
      add(svg, "line", { class: `line ${kind}`, x1: 1, x2: 33, y1: 7, y2: 7 });
      mark(svg, kind, 17, 7);
      add(item, "span", {}, title);
    }
  }

  function draw(f, series, x) {
    const placed = series.map(({ kind, values }) => ({ kind, points: values.map((value, i) => (value > 0 ? [x(i), f.y(value)] : null)).filter(Boolean) }));
    for (const { kind, points } of placed)
      if (points.length > 1) add(f.svg, "polyline", { class: `line ${kind}`, points: points.map((p) => p.map((v) => v.toFixed(1)).join()).join(" ") });
    // Marks stand above all lines, those of what is attained last: none hides them.
    for (const { kind, points } of placed) for (const [left, top] of points) mark(f.svg, kind, left, top);
  }

  // -- what is shown of one layer

  // Names of layers without the parts that all of them share, so that they differ where there is little room.
  const parts = data.layers.map((layer) => layer.name.split("."));
  const shared = (lists) => {
    const count = lists[0].findIndex((part, i) => lists.some((list) => list[i] !== part));
    return count < 0 ? 0 : count;
  };
  const before = shared(parts), after = shared(parts.map((list) => list.slice(before).reverse()));
  const shortName = (layer) => layer.name.split(".").slice(before, after ? -after : undefined).join(".") || layer.name;
  const layerTitle = (layer) => `Layer ${layer.index}`;
  function numbers(layer, eps = state.eps) {
    const b = state.input, radius = data.eps[eps];
    return {
      slope: layer.slope[b],
      upper: layer.slope_upper ? layer.slope_upper[b] : null,
      bound: layer.bound ? layer.bound[b][eps] : null,
      attack: layer.attack ? layer.attack[b][eps] : null,
      radius,
    };
  }
  const whyNot = (layer) => layer.note.replace(/^bound '[^']*' does not apply: /, "");

  function summary() {
    const layer = data.layers[state.layer], n = numbers(layer), answer = clear(byId("answer"));
    const strong = (text) => add(answer, "b", {}, text);
    answer.append(`If the input of ${layerTitle(layer).toLowerCase()} moves by at most `);
    strong(short(n.radius));
    if (n.bound !== null) {
      answer.append(", its output moves by at most ");
      strong(up(n.bound));
    } else answer.append(", there is no bound of how far its output moves: " + whyNot(layer));
    if (n.attack !== null) {
      answer.append(". Some perturbation moves it by ");
      strong(down(n.attack));
      if (n.bound !== null && n.attack > 0)
        answer.append(`: the bound is ${up(n.bound / n.attack)} times what is attained`);
    }
    answer.append(".");

    const figures = clear(byId("figures"));
    const figure = (name, value, kind, belief, none = false) => {
      const box = add(figures, "div", { class: "figure" });
      add(box, "div", { class: "name" }, name);
      add(box, "div", { class: none ? "value none" : "value" }, value);
      add(box, "span", { class: `tag ${kind}` }, belief);
    };
    const radius = `eps = ${short(n.radius)}`;
    const proved = document.querySelector(".methods .tag").classList.contains("proved");
    if (n.bound !== null) figure(`at most, ${radius}`, up(n.bound), proved ? "proved" : "numerical", proved ? "■ proved" : "◆ numerical");
    else figure(`at most, ${radius}`, whyNot(layer), "numerical", "no bound", true);
    if (n.attack !== null) figure(`at least, ${radius}`, down(n.attack), "lower", "▲ attained");
    figure("local constant", digits(n.slope), "estimate", "○ estimate");
    if (n.upper !== null) figure("local constant", up(n.upper), "proved", "■ proved");

    const facts = clear(byId("facts")), b = state.input;
    const steepest = data.layers[largest(data.layers.map((l) => l.slope[b]))];
    const flattest = data.layers[largest(data.layers.map((l) => -l.slope[b]))];
    if (data.layers.length > 1)
      add(facts, "li", {}, `Steepest: layer ${steepest.index}, local constant ${digits(steepest.slope[b])}. Flattest: layer ${flattest.index}, ${digits(flattest.slope[b])}.`);
    const tops = data.layers.map((l) => Math.max(...l.head_slope[b])), where = data.layers[largest(tops)];
    add(facts, "li", {}, `Steepest head: head ${largest(where.head_slope[b])} of layer ${where.index}, local constant ${digits(Math.max(...tops))}.`);
    const energy = layer.energy[b], top = largest(energy);
    add(facts, "li", {}, `In layer ${layer.index}, “${data.inputs[b].tokens[top]}” moves the output most: ${percent(energy[top])} of the most sensitive direction.`);
    const pairs = data.layers.filter((l) => l.bound && l.attack).map((l) => l.bound[b][state.eps] / l.attack[b][state.eps]).filter(Number.isFinite);
    if (pairs.length) {
      const sorted = pairs.sort((p, q) => p - q);
      add(facts, "li", {}, `At ${radius} the bound is ${up(sorted[0])} to ${up(sorted[sorted.length - 1])} times what an attack attains.`);
    }
  }

  function depth() {
    const all = data.layers.map((layer) => numbers(layer)), radius = data.eps[state.eps];
    const series = [
      { kind: "bound", title: `bound / eps at eps = ${short(radius)}`, values: all.map((n) => (n.bound === null ? null : n.bound / radius)) },
      { kind: "upper", title: "local constant, proved", values: all.map((n) => n.upper) },
      { kind: "slope", title: "local constant", values: all.map((n) => n.slope) },
      { kind: "attack", title: "attained / eps", values: all.map((n) => (n.attack === null ? null : n.attack / radius)) },
    ].filter((s) => s.values.some((value) => value > 0));
    legend("depth-legend", series);
    const values = series.flatMap((s) => s.values).filter((v) => v > 0), log = Math.max(...values) > 12 * Math.min(...values);
    const f = frame("depth", "Gain of every layer: bound, local constant and attack", axis(values, log), 300, log ? "output / input, logarithmic" : "output / input");
    const column = f.inner / data.layers.length, x = (i) => f.margin.left + (i + 0.5) * column;
    const every = Math.ceil(data.layers.length / (f.inner / 26));
    add(f.svg, "rect", { class: "chosen", x: x(state.layer) - column / 2, width: column, y: f.margin.top, height: f.height - f.margin.top - f.margin.bottom });
    data.layers.forEach((layer, i) => i % every || add(f.svg, "text", { x: x(i), y: f.height - f.margin.bottom + 18, "text-anchor": "middle" }, layer.index));
    add(f.svg, "text", { x: f.margin.left + f.inner / 2, y: f.height - 4, "text-anchor": "middle" }, "attention layer");
    draw(f, series, x);
    const columns = data.layers.map((layer, i) => {
      const hit = add(f.svg, "rect", { class: "hit", role: "button", x: x(i) - column / 2, width: column, y: f.margin.top, height: f.height - f.margin.top - f.margin.bottom });
      const n = all[i], lines = [`${layerTitle(layer)}: ${layer.name}`, `local constant ${digits(n.slope)}`];
      lines.push(n.bound === null ? whyNot(layer) : `bound ${up(n.bound)} at eps ${short(radius)}`);
      if (n.attack !== null) lines.push(`attained ${down(n.attack)}`);
      explain(hit, lines.join("\n"));
      hit.addEventListener("click", () => choose({ layer: i }));
      return hit;
    });
    keys(columns, 1, state.layer);
  }

  const shade = (share, from = "--low", to = "--high") => `color-mix(in oklab, var(${to}) ${(100 * share).toFixed(1)}%, var(${from}))`;
  function scale(id, low, high, colour) {
    const box = clear(byId(id));
    add(box, "span", {}, low);
    add(box, "i").style.background = `linear-gradient(to right, ${[0, 0.25, 0.5, 0.75, 1].map(colour).join(", ")})`;
    add(box, "span", {}, high);
  }

  function heat() {
    const { key, title, meaning } = data.quantities[state.quantity], b = state.input;
    byId("quantity-meaning").textContent = `${title}: ${meaning}. Rows are layers, columns are heads.`;
    const rows = data.layers.map((layer) => layer[key][b]), flat = rows.flat();
    const low = Math.min(...flat), high = Math.max(...flat), heads = Math.max(...rows.map((row) => row.length));
    const table = add(clear(byId("heat")), "table", { "aria-label": `${title} of every head` });
    table.style.minWidth = `${40 + 32 * heads}px`; // room for every number; a narrow screen scrolls
    const head = add(add(table, "thead"), "tr");
    add(head, "th", { scope: "col" }, "layer");
    for (let i = 0; i < heads; i++) add(head, "th", { scope: "col", "aria-label": `head ${i}` }, i);
    const body = add(table, "tbody"), cells = [];
    rows.forEach((row, i) => {
      const line = add(body, "tr", i === state.layer ? { class: "chosen-row" } : {});
      add(line, "th", { scope: "row", "aria-label": layerTitle(data.layers[i]) }, data.layers[i].index);
      row.forEach((value, j) => {
        const share = high > low ? (value - low) / (high - low) : 0;
        const cell = add(line, "td", {}, String(Number(value.toPrecision(2))));
        cell.style.background = shade(share);
        cell.style.color = share > 0.55 ? "var(--card)" : "var(--ink)";
        explain(cell, `Layer ${data.layers[i].index}, head ${j}\n` + data.quantities.map((q) => `${q.title} ${digits(data.layers[i][q.key][b][j])}`).join("\n"));
        cell.addEventListener("click", () => choose({ layer: i }));
        cells.push(cell);
      });
    });
    keys(cells, heads);
    scale("heat-scale", digits(low), digits(high), (share) => shade(share));
  }

  function quantityButtons() {
    const box = byId("quantities");
    const buttons = data.quantities.map(({ title }, i) => {
      const button = add(box, "button", { type: "button", role: "radio", "aria-checked": i === 0 }, title);
      button.addEventListener("click", () => {
        state.quantity = i;
        buttons.forEach((other, j) => other.setAttribute("aria-checked", i === j));
        heat();
      });
      return button;
    });
    keys(buttons);
  }

  function tokens() {
    const layer = data.layers[state.layer], box = clear(byId("tokens"));
    const images = Boolean(data.inputs[0].image);
    byId("tokens-text").textContent =
      `Share of each ${images ? "patch" : "token"} in the direction that moves the output of layer ${layer.index} most, to first order.`;
    data.inputs.forEach((input, b) => (images ? picture : sentence)(box, input, layer.energy[b], b));
    const only = data.inputs.length === 1 ? range(layer.energy[0], data.inputs[0].padding) : null;
    scale("tokens-scale", only ? percent(only.low) : "smallest share", only ? percent(only.high) : "largest share of the input", tint);
  }

  // The square root of a share is the length of the token's part of the direction; it keeps small shares in sight.
  function range(energy, padding) {
    const shares = energy.filter((_, i) => !padding[i]);
    return { low: Math.min(...shares), high: Math.max(...shares) };
  }
  function strength(share, { low, high }) {
    const [s, l, h] = [share, low, high].map(Math.sqrt);
    return h > l ? (s - l) / (h - l) : 0;
  }
  const tint = (part) => `color-mix(in srgb, var(--shade) ${(90 * part).toFixed(1)}%, transparent)`;

  function sentence(parent, input, energy, b) {
    const line = add(parent, "p", { class: "text" }), top = largest(energy), seen = range(energy, input.padding), nodes = [];
    if (data.inputs.length > 1) add(line, "span", { class: "number" }, `${b + 1}`);
    input.tokens.forEach((token, i) => {
      if (input.padding[i]) return;
      if (!input.glued[i] || !i) line.append(" ");
      const kinds = ["token", i === top ? "top" : "", /^(\[.*\]|<.*>)$/.test(token) ? "special" : ""];
      const node = add(line, "span", { class: kinds.join(" ").trim(), role: "img" }, token);
      const part = strength(energy[i], seen);
      node.style.background = tint(part);
      if (part > 0.65) node.style.color = "#17202c"; // dark on orange, in light and dark
      explain(node, `“${token}”, token ${i}\n${percent(energy[i])} of the most sensitive direction`);
      nodes.push(node);
    });
    const padding = input.padding.filter(Boolean).length;
    if (padding) line.append(" "), add(line, "span", { class: "token padding" }, `${padding} × padding, not counted`);
    keys(nodes, 1, nodes.findIndex((node) => node.classList.contains("top")));
  }

  function picture(box, input, energy, b) {
    const parent = add(box, "div", { class: "pictures" });
    const [rows, columns] = input.grid, prefix = input.tokens.length - rows * columns, seen = range(energy, input.padding);
    const kind = input.image.startsWith("data:image/jpeg") ? "picture photo" : "picture";
    const plain = add(add(parent, "figure"), "div", { class: kind });
    add(plain, "img", { src: input.image, alt: `Input ${b + 1}` });
    add(plain.parentNode, "figcaption", {}, `Input ${b + 1}, as the model sees it`);
    const figure = add(parent, "figure"), shaded = add(figure, "div", { class: `${kind} shaded` }), cells = [];
    add(shaded, "img", { src: input.image, alt: "" });
    const svg = add(shaded, "svg", { viewBox: `0 0 ${columns} ${rows}`, preserveAspectRatio: "none", role: "group", "aria-label": "Patches shaded by sensitivity" });
    for (let i = 0; i < rows * columns; i++) {
      const share = energy[prefix + i];
      const cell = add(svg, "rect", { class: "patch", role: "img", x: i % columns, y: Math.floor(i / columns), width: 1, height: 1 });
      cell.style.fill = tint(strength(share, seen));
      explain(cell, `${input.tokens[prefix + i]}\n${percent(share)} of the most sensitive direction`);
      cells.push(cell);
    }
    keys(cells, columns);
    const others = energy.slice(0, prefix).reduce((sum, value) => sum + value, 0);
    add(figure, "figcaption", {}, `Shaded by sensitivity${prefix ? `; the ${prefix === 1 ? "class token" : `${prefix} tokens before the patches`}: ${percent(others)}` : ""}`);
  }

  function radii() {
    const layer = data.layers[state.layer], all = data.eps.map((_, e) => numbers(layer, e));
    const positive = all.filter((n) => n.radius > 0);
    byId("radii-text").textContent =
      `How far the output of layer ${layer.index} moves, against eps, on logarithmic axes.` + (layer.bound && layer.attack ? " The truth lies between attack and bound." : "");
    const series = [
      { kind: "bound", title: "bound", values: positive.map((n) => n.bound) },
      { kind: "slope", title: "local constant × eps (first order)", values: positive.map((n) => n.slope * n.radius) },
      { kind: "attack", title: "attained by an attack", values: positive.map((n) => n.attack) },
    ].filter((s) => s.values.some((value) => value > 0));
    legend("radii-legend", series);
    const f = frame("radii", `Bound and attack of layer ${layer.index} against eps`, axis(series.flatMap((s) => s.values), true), 300, "movement of the output");
    const across = axis(positive.map((n) => n.radius), true);
    const x = (i) => f.margin.left + (positive.length > 1 ? across.at(positive[i].radius) : 0.5) * f.inner;
    positive.forEach((n, i) => {
      add(f.svg, "line", { class: "grid", x1: x(i), x2: x(i), y1: f.margin.top, y2: f.height - f.margin.bottom });
      add(f.svg, "text", { x: x(i), y: f.height - f.margin.bottom + 18, "text-anchor": "middle" }, short(n.radius));
    });
    add(f.svg, "text", { x: f.margin.left + f.inner / 2, y: f.height - 4, "text-anchor": "middle" }, "eps: how far the input may move");
    if (!layer.bound) add(f.svg, "text", { class: "none", x: f.margin.left + 12, y: f.margin.top + 18 }, `No bound: ${whyNot(layer)}`);
    draw(f, series, x);
    const width = f.inner / positive.length / 1.5;
    keys(positive.map((n, i) => {
      const hit = add(f.svg, "rect", { class: "hit", role: "button", x: x(i) - width / 2, width, y: f.margin.top, height: f.height - f.margin.top - f.margin.bottom });
      const lines = [`eps ${short(n.radius)}`, n.bound === null ? whyNot(layer) : `bound ${up(n.bound)}`];
      if (n.attack !== null) lines.push(`attained ${down(n.attack)}`);
      if (n.bound !== null && n.attack > 0) lines.push(`ratio ${up(n.bound / n.attack)}`);
      explain(hit, lines.join("\n"));
      hit.addEventListener("click", () => choose({ eps: data.eps.indexOf(n.radius) }));
      return hit;
    }));
  }

  // -- the table

  const sorting = { column: 0, ascending: true };
  function columns() {
    const b = state.input, radius = short(data.eps[state.eps]), top = (key) => (l) => Math.max(...l[key][b]);
    return [
      { title: "layer", value: (l) => l.index, show: String },
      { title: "name", value: shortName, show: String },
      { title: "local constant", value: (l) => l.slope[b], show: digits },
      ...(data.layers.some((l) => l.slope_upper) ? [{ title: "… proved", value: (l) => l.slope_upper && l.slope_upper[b], show: up }] : []),
      { title: `bound at ${radius}`, value: (l) => numbers(l).bound, show: up },
      { title: `attained at ${radius}`, value: (l) => numbers(l).attack, show: down },
      { title: "ratio", value: (l) => (l.bound && l.attack ? numbers(l).bound / numbers(l).attack : null), show: up },
      { title: "head", value: top("head_slope"), show: digits },
      { title: "softmax norm", value: top("softmax_norm"), show: digits },
      { title: "‖P‖", value: top("attention_norm"), show: digits },
      { title: "entropy", value: top("entropy"), show: digits },
      { title: "rebuild error", value: (l) => l.rebuild_error, show: up },
    ];
  }

  function table() {
    const all = columns();
    sortedTable("table", all, data.layers, sorting, 2, (row, layer, i) => {
      row.classList.toggle("chosen-row", i === state.layer);
      row.addEventListener("click", () => choose({ layer: i }));
      all.forEach(({ title }, j) => {
        if (title === "name") {
          row.cells[j].className = "name";
          explain(row.cells[j], `${layer.name}\n${layer.layer}\nanalyzed in ${digits(layer.seconds)} s`);
        }
        if (title.startsWith("bound") && !layer.bound) explain(row.cells[j], whyNot(layer));
      });
    });
  }

  // -- choosing

  const drawn = [summary, depth, heat, tokens, radii, table];
  function choose(change) {
    const focused = document.activeElement && document.activeElement.closest(".chart, #heat");
    Object.assign(state, change);
    for (const name of ["input", "layer", "eps"]) byId(`pick-${name}`).value = state[name];
    hideTip();
    for (const part of drawn) part();
    if (focused) {
      const again = focused.querySelector("[tabindex='0']");
      if (again) again.focus();
    }
  }

  const options = {
    input: data.inputs.map((input, i) => `${i + 1}` + (input.image ? "" : `: ${input.tokens.filter((_, j) => !input.padding[j]).slice(0, 8).join(" ").slice(0, 40)}…`)),
    layer: data.layers.map((layer) => (shortName(layer) === String(layer.index) ? layer.name : `${layer.index}: ${shortName(layer)}`)),
    eps: data.eps.map(short),
  };
  for (const [name, titles] of Object.entries(options)) {
    titles.forEach((title, i) => add(byId(`pick-${name}`), "option", { value: i }, title));
    byId(`pick-${name}`).addEventListener("change", (event) => choose({ [name]: Number(event.target.value) }));
  }

  quantityButtons();
  const steepest = largest(data.layers.map((layer) => layer.slope[0]));
  choose({ layer: steepest });
  let width = innerWidth;
  addEventListener("resize", () => {
    if (width !== innerWidth) { width = innerWidth; depth(); radii(); }
  });
})();
