(() => {
  const data = JSON.parse(byId("data").textContent);
  for (const record of data.runs.flatMap((run) => run.records))
    if (record.attack_radius === "inf") record.attack_radius = Infinity;
  const shown = data.radii.some((radius) => radius > 0) ? data.radii : [0];
  const state = { radius: 0, run: 0 };
  const sorting = { column: 0, ascending: true };

  // -- shares of the inputs

  const right = (record) => record.prediction === record.label;
  const share = (run, keep) => run.records.filter((record) => right(record) && keep(record)).length / run.records.length;
  const certified = (run, radius) => share(run, (record) => record.radius >= radius);
  const attacked = (run, radius) => share(run, (record) => record.attack_radius > radius);
  const clean = (run) => share(run, () => true);
  const exact = (value, round) => (round(Number((1000 * value).toFixed(6))) / 10).toFixed(1) + " %";
  const least = (value) => exact(value, Math.floor), most = (value) => exact(value, Math.ceil);
  const withAttack = data.runs.find((run) => run.attacked);
  const median = (values) => {
    const sorted = [...values].sort((p, q) => p - q), middle = sorted.length / 2;
    if (!sorted.length) return null;
    return sorted.length % 2 ? sorted[Math.floor(middle)] : (sorted[middle - 1] + sorted[middle]) / 2;
  };
  const finite = (value) => (Number.isFinite(value) ? up(value) : "none found");
  const title = (run) => `certified: ${run.method}, ${run.guarantee}`;
  const ratios = (run) =>
    run.records.filter((r) => right(r) && r.attack_radius > 0 && Number.isFinite(r.attack_radius)).map((r) => r.radius / r.attack_radius);

  // The radius at which the page opens: where the first run certifies a part of what an attack leaves, the one with the
  // largest gap; if there is none, where the curves are furthest apart, the smallest of those.
  function apart() {
    const top = (radius) => (withAttack ? attacked(withAttack, radius) : clean(data.runs[0]));
    const gap = (radius) => {
      const share = certified(data.runs[0], radius);
      return radius > 0 && share > 0 && share < top(radius) ? top(radius) - share : -1;
    };
    const spread = (radius) => {
      const shares = data.runs.map((run) => certified(run, radius));
      return radius > 0 ? Math.max(top(radius), ...shares) - Math.min(...shares) : -1;
    };
    const telling = shown.map(gap);
    return largest(telling.some((value) => value > 0) ? telling : shown.map(spread));
  }

  // What a radius means for a picture of 255 grey levels.
  function units(radius) {
    if (!data.pixels || !(radius > 0)) return "";
    if (data.norm === "linf") return ` (${short(255 * radius)} of 255 grey levels in every pixel at once)`;
    const levels = 255 * radius;
    if (levels < 1) return ` (${short(levels)} of a grey level in one pixel)`;
    const one = `${short(levels)} of 255 grey levels in a single pixel`;
    const many = Math.floor(levels ** 2), each = levels / Math.sqrt(data.values);
    if (many < data.values) return ` (as far as one of 255 grey levels in ${short(many)} pixels, or ${one})`;
    return ` (as far as ${short(each)} of 255 grey levels in each of ${data.values} pixels, or ${one})`;
  }

  function summary() {
    const run = data.runs[state.run], radius = shown[state.radius], answer = clear(byId("answer"));
    const strong = (text) => add(answer, "b", {}, text);
    answer.append(`Of ${run.records.length} inputs `);
    strong(exact(clean(run), Math.round));
    answer.append(` are answered correctly. Under every perturbation (${data.perturbations}) up to `);
    strong(short(radius));
    answer.append(units(radius));
    answer.append(run.guarantee === "proved" ? ", it is proved that at least " : ", by numerical norms, ");
    strong(least(certified(run, radius)));
    answer.append(" stay correct");
    if (withAttack) {
      answer.append("; after an attack, at most ");
      strong(most(attacked(withAttack, radius)));
      answer.append(" are");
    }
    answer.append(".");
    const figures = clear(byId("figures"));
    const figure = (name, value, kind, belief) => {
      const box = add(figures, "div", { class: "figure" });
      add(box, "div", { class: "name" }, name);
      add(box, "div", { class: "value" }, value);
      add(box, "span", { class: `tag ${kind}` }, belief);
    };
    const correct = run.records.filter(right), proved = run.guarantee === "proved";
    figure("median radius", down(median(correct.map((r) => r.radius))), proved ? "proved" : "numerical", proved ? "■ proved" : "◆ numerical");
    if (withAttack) figure("median distance of the nearest change found", finite(median(withAttack.records.filter(right).map((r) => r.attack_radius))), "lower", "▲ attained");
    if (run.attacked && ratios(run).length) figure("median certified / attack", down(median(ratios(run))), proved ? "proved" : "numerical", "1 would be exact");
    figure("seconds per input", digits(run.records.reduce((sum, r) => sum + r.seconds, 0) / run.records.length), "estimate", "wall time");
  }

  // -- curves: a share falls where the radius of an input ends

  function series() {
    const lines = data.runs.map((run, i) => ({ kind: `run run-${i % 4}`, title: title(run), run, ends: run.records.filter(right).map((r) => r.radius), at: (r) => certified(run, r) }));
    if (withAttack)
      lines.unshift({ kind: "attacked", title: "after the attack: no proof can reach higher", run: withAttack, ends: withAttack.records.filter(right).map((r) => r.attack_radius), at: (r) => attacked(withAttack, r) });
    return lines;
  }

  function curve() {
    const lines = series(), box = clear(byId("curve-legend"));
    for (const line of lines) {
      const item = add(box, "span"), svg = add(item, "svg", { width: 34, height: 14, "aria-hidden": "true" });
      add(svg, "line", { class: `line ${line.kind}`, x1: 1, x2: 33, y1: 7, y2: 7 });
      add(item, "span", {}, line.title);
    }
    const ends = lines.flatMap((line) => line.ends).filter(Number.isFinite);
    const furthest = 1.05 * Math.max(...ends, ...shown, 1e-9);
    const scale = { at: (v) => v / 1.02, ticks: [0, 0.2, 0.4, 0.6, 0.8, 1] };
    const f = frame("curve", "Certified accuracy against the radius, and what the attack leaves", scale, 320, "accuracy");
    const x = (radius) => f.margin.left + (radius / furthest) * f.inner, floor = f.height - f.margin.bottom;
    for (const tick of ticks(0, furthest, false).filter((v) => v <= furthest))
      add(f.svg, "text", { x: x(tick), y: floor + 18, "text-anchor": "middle" }, short(tick));
    add(f.svg, "text", { x: f.margin.left + f.inner / 2, y: f.height - 4, "text-anchor": "middle" }, `radius (${data.perturbations})`);
    add(f.svg, "line", { class: "chosen-line", x1: x(shown[state.radius]), x2: x(shown[state.radius]), y1: f.margin.top, y2: floor });
    for (const line of lines) {
      const sorted = line.ends.filter(Number.isFinite).sort((p, q) => p - q), count = line.run.records.length;
      let path = `M${x(0)} ${f.y(line.ends.length / count)}`;
      sorted.forEach((end, i) => (path += `H${x(end).toFixed(1)}V${f.y((line.ends.length - i - 1) / count).toFixed(1)}`));
      const kept = line.ends.length - sorted.length; // a line that has come down to 0 ends there, with a dot
      add(f.svg, "path", { class: `line ${line.kind}`, d: kept ? `${path}H${f.width - f.margin.right}` : path });
      if (!kept && sorted.length) {
        const end = sorted[sorted.length - 1];
        const dot = add(f.svg, "circle", { class: `line end ${line.kind}`, cx: x(end), cy: f.y(0), r: 4 });
        explain(dot, `${line.title}: nothing beyond ${short(end)}`);
      }
    }
    const columns = Math.min(48, Math.floor(f.inner / 14)), width = f.inner / columns;
    keys(Array.from({ length: columns }, (_, i) => {
      const radius = Number(((i + 0.5) / columns * furthest).toPrecision(3));
      const hit = add(f.svg, "rect", { class: "hit", x: f.margin.left + i * width, width, y: f.margin.top, height: floor - f.margin.top, role: "img" });
      explain(hit, [`radius ${short(radius)}`, ...lines.map((l) => `${l.title}: ${(l.kind === "attacked" ? most : least)(l.at(radius))}`), `clean: ${exact(clean(data.runs[0]), Math.round)}`].join("\n"));
      return hit;
    }));
  }

  function radii() {
    const head = add(clear(document.querySelector("#radii thead")), "tr"), body = clear(document.querySelector("#radii tbody"));
    const columns = data.runs.map((run) => ({ name: title(run), cell: (r) => least(certified(run, r)) }));
    if (withAttack) columns.push({ name: "after the attack", cell: (r) => most(attacked(withAttack, r)) });
    for (const name of ["radius", ...columns.map((column) => column.name)]) add(head, "th", { scope: "col" }, name);
    for (const radius of new Set([0, ...data.radii])) {
      const row = add(body, "tr");
      add(row, "th", { scope: "row" }, short(radius));
      for (const { cell } of columns) add(row, "td", {}, cell(radius));
    }
  }

  function histogram() {
    const run = data.runs[state.run], values = run.attacked ? ratios(run) : [];
    byId("ratio-card").hidden = !values.length;
    if (!values.length) return;
    byId("ratio-text").textContent = `Certified radius divided by the distance of the nearest change that was found, for ${values.length} inputs that are classified correctly (${run.method}). The true radius lies between this share and 1.`;
    const bins = 20, counts = Array(bins).fill(0);
    for (const value of values) counts[Math.min(bins - 1, Math.floor(value * bins))]++;
    const scale = axis([Math.max(...counts)], false);
    const f = frame("ratio", "Histogram of certified radius over attack radius", { ...scale, ticks: scale.ticks.filter(Number.isInteger) }, 220, "inputs");
    const width = f.inner / bins, floor = f.height - f.margin.bottom;
    counts.forEach((count, i) => {
      const bar = add(f.svg, "rect", { class: "bar", x: f.margin.left + i * width + 1, width: width - 2, y: count ? f.y(count) : floor, height: count ? floor - f.y(count) : 0 });
      explain(bar, `${short(i / bins)} to ${short((i + 1) / bins)}: ${count} input${count === 1 ? "" : "s"}`);
    });
    for (const tick of [0, 0.2, 0.4, 0.6, 0.8, 1])
      add(f.svg, "text", { x: f.margin.left + tick * f.inner, y: floor + 18, "text-anchor": "middle" }, short(tick));
    add(f.svg, "text", { x: f.margin.left + f.inner / 2, y: f.height - 4, "text-anchor": "middle" }, "certified / attack");
  }

  function table() {
    const run = data.runs[state.run], plain = (value) => String(value);
    const columns = [
      { title: "index", value: (r) => r.index, show: plain },
      { title: "label", value: (r) => r.label, show: plain },
      { title: "prediction", value: (r) => r.prediction, show: (value) => plain(value).replace("-", "−") },
      { title: "margin", value: (r) => r.margin, show: down },
      { title: "radius", value: (r) => r.radius, show: down },
      { title: "method", value: (r) => r.method, show: plain },
    ];
    if (run.attacked)
      columns.push(
        { title: "attack", value: (r) => r.attack_radius, show: finite },
        { title: "radius / attack", value: (r) => (r.attack_radius > 0 ? r.radius / r.attack_radius : null), show: down },
      );
    columns.push({ title: "seconds", value: (r) => r.seconds, show: digits });
    sorting.column = Math.min(sorting.column, columns.length - 1);
    sortedTable("table", columns, run.records, sorting, 3, (row, record) => row.classList.toggle("wrong", !right(record)));
  }

  // -- choosing

  function choose(change) {
    Object.assign(state, change);
    byId("pick-radius").value = state.radius;
    byId("pick-run").value = state.run;
    hideTip();
    for (const part of [summary, curve, radii, histogram, table]) part();
  }
  shown.forEach((radius, i) => add(byId("pick-radius"), "option", { value: i }, short(radius)));
  data.runs.forEach((run, i) => add(byId("pick-run"), "option", { value: i }, `${run.method}, ${run.guarantee}`));
  for (const name of ["radius", "run"])
    byId(`pick-${name}`).addEventListener("change", (event) => choose({ [name]: Number(event.target.value) }));
  for (const sentence of document.querySelectorAll("#inputs .text"))
    keys([...sentence.children], 1, Math.max(0, [...sentence.children].findIndex((word) => word.classList.contains("top"))));
  choose({ radius: apart() });
  let width = innerWidth;
  addEventListener("resize", () => {
    if (width !== innerWidth) { width = innerWidth; curve(); histogram(); }
  });
})();
