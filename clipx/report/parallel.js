// Parallel coordinates of runs, linked with the table of runs and with charts of one series for each run: the run
// under the pointer is highlighted everywhere; a range that is dragged on an axis selects runs everywhere.
for (const place of document.querySelectorAll("figure.parallel")) (() => {
  const { make, rankColour } = clipxTools;
  const { axes, runs, charts } = JSON.parse(document.getElementById("parallel").textContent);
  const group = clipxCharts.groups[charts];
  const rows = new Map([...document.querySelectorAll("tr[data-run]")].map(row => [row.dataset.run, row]));
  const HEIGHT = 360, TOP = 58, BOTTOM = 14, BEFORE = 74, AFTER = 84;
  const brushes = axes.map(() => null);
  const head = make("div", { class: "head" }, place);
  const note = make("p", { class: "muted" }, head);
  const clear = make("button", { type: "button", class: "small", hidden: "" }, head, "select all");
  const scroll = make("div", { class: "scroll" }, place);
  const svg = make("svg", { role: "img", "aria-label": "parallel coordinates; the table of points has the same values" }, scroll);
  const tip = make("div", { class: "tip", hidden: "" }, place);
  let width = 0, lines = [], chosen = null;

  const at = i => BEFORE + i * (width - BEFORE - AFTER) / Math.max(1, axes.length - 1);
  const py = p => TOP + (1 - p) * (HEIGHT - TOP - BOTTOM);
  const matches = r => axes.every((axis, i) => !brushes[i] || (axis.at[r] !== null && axis.at[r] >= brushes[i][0] && axis.at[r] <= brushes[i][1]));
  const colour = r => runs[r].rank === null ? "var(--muted)" : rankColour(runs[r].rank);

  const draw = () => {
    width = Math.max(place.clientWidth, BEFORE + AFTER + 96 * (axes.length - 1));
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    svg.style.width = `${width}px`;
    const order = runs.map((_, r) => r).sort((a, b) => (runs[a].rank ?? -1) - (runs[b].rank ?? -1));
    lines = [];
    for (const r of order) {
      const points = axes.map((axis, i) => axis.at[r] === null ? null : `${at(i).toFixed(1)} ${py(axis.at[r]).toFixed(1)}`);
      const d = points.map((p, i) => p === null ? "" : (i && points[i - 1] !== null ? "L" : "M") + p).join("");
      lines[r] = make("path", { d, class: runs[r].rank === null ? "run none" : "run", style: `stroke:${colour(r)}` }, svg);
    }
    axes.forEach((axis, i) => drawAxis(axis, i));
    show();
  };
  const drawAxis = (axis, i) => {
    const x = at(i), last = i === axes.length - 1;
    make("line", { x1: x, x2: x, y1: py(1), y2: py(0), class: "axis" }, svg);
    axis.title.forEach((line, k, all) => {
      const half = 3.7 * line.length, centre = Math.max(half, Math.min(width - half, x));
      make("text", { x: centre, y: TOP - 12 - 13 * (all.length - 1 - k), class: "name", "text-anchor": "middle" }, svg, line);
    });
    for (const [p, text] of axis.labels)
      make("text", { x: x + (last ? 8 : -8), y: py(p) + 3.5, class: "label", "text-anchor": last ? "start" : "end" }, svg, text);
    if (brushes[i]) make("rect", { x: x - 7, y: py(brushes[i][1]), width: 14, height: py(brushes[i][0]) - py(brushes[i][1]), class: "brush" }, svg);
    const area = make("rect", { x: x - 12, y: TOP - 6, width: 24, height: HEIGHT - TOP - BOTTOM + 12, class: "area" }, svg);
    make("title", {}, area, "drag to select a range, click to remove it");
    const value = e => Math.min(1, Math.max(0, 1 - (e.clientY - svg.getBoundingClientRect().top - TOP) / (HEIGHT - TOP - BOTTOM)));
    area.addEventListener("pointerdown", e => {
      const start = value(e), release = () => { removeEventListener("pointermove", move); removeEventListener("pointerup", up); removeEventListener("pointercancel", up); };
      const move = f => { brushes[i] = [Math.min(start, value(f)) - .004, Math.max(start, value(f)) + .004]; tip.hidden = true; draw(); };
      const up = f => { release(); if (Math.abs(value(f) - start) < .012) brushes[i] = null; draw(); };
      addEventListener("pointermove", move);
      addEventListener("pointerup", up);
      addEventListener("pointercancel", up);
      e.preventDefault();
    });
  };
  const show = () => {
    const filtered = brushes.some(b => b), selected = runs.filter((_, r) => matches(r));
    const ids = new Set(selected.map(run => run.id));
    note.textContent = filtered ? `${selected.length} of ${runs.length} points are selected.`
      : `A line for each of ${runs.length} points. Drag on an axis to select a range; dashed: without a value.`;
    clear.hidden = !filtered;
    runs.forEach((run, r) => {
      lines[r].classList.toggle("off", !ids.has(run.id));
      lines[r].classList.toggle("chosen", run.id === chosen);
      const row = rows.get(run.id);
      if (row) { row.hidden = !ids.has(run.id); row.classList.toggle("chosen", run.id === chosen); }
    });
    const r = runs.findIndex(run => run.id === chosen);
    if (r >= 0) lines[r].parentNode.insertBefore(lines[r], svg.querySelector(".axis"));
    const filter = filtered ? ids : null, text = filter && [...filter].join();
    if (group && (group.filter && [...group.filter].join()) !== text) { group.filter = filter; group.draw(); }
  };
  const highlight = id => { if (group) group.highlight(id); else { chosen = id; show(); } };
  document.addEventListener("clipx-highlight", e => { chosen = e.detail; show(); });
  const near = e => {
    const box = svg.getBoundingClientRect(), x = e.clientX - box.left, y = e.clientY - box.top;
    const step = axes.length > 1 ? at(1) - at(0) : 1, i = Math.min(axes.length - 2, Math.max(0, Math.floor((x - BEFORE) / step)));
    let best = null, least = 14;
    runs.forEach((run, r) => {
      const [a, b] = [axes[i]?.at[r], (axes[i + 1] ?? axes[i])?.at[r]];
      if (a === null || b === null || a === undefined || !matches(r)) return;
      const d = Math.abs(py(a + (b - a) * Math.min(1, Math.max(0, (x - at(i)) / step))) - y);
      if (d < least) [best, least] = [r, d];
    });
    return best;
  };
  svg.addEventListener("pointermove", e => {
    if (e.buttons) return;
    const r = near(e);
    tip.hidden = r === null;
    highlight(r === null ? null : runs[r].id);
    if (r === null) return;
    tip.replaceChildren();
    make("div", { class: "where" }, tip, `${runs[r].name}, ${runs[r].state}`);
    for (const [name, value] of runs[r].values) {
      const row = make("div", { class: "value" }, tip);
      make("span", {}, row, name);
      make("b", {}, row, value);
    }
    const box = place.getBoundingClientRect(), x = e.clientX - box.left, wide = tip.offsetWidth;
    tip.style.left = `${Math.max(0, x > box.width / 2 ? x - wide - 16 : Math.min(x + 16, box.width - wide))}px`;
    tip.style.top = `${scroll.offsetTop + TOP}px`;
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; highlight(null); });
  for (const [id, row] of rows) {
    row.addEventListener("pointerenter", () => highlight(id));
    row.addEventListener("pointerleave", () => highlight(null));
  }
  clear.onclick = () => { brushes.fill(null); draw(); };
  new ResizeObserver(() => draw()).observe(place);
})();
