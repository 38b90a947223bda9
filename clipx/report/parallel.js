// Parallel coordinates of runs, linked with the table of runs and with charts of one series for each run: the run
// under the pointer is highlighted everywhere; a range that is dragged on an axis selects runs everywhere, and so does
// a click on a line. Each axis is a box with its labels, between the lines. On a narrow page the axes are rows.
for (const place of document.querySelectorAll("figure.parallel")) (() => {
  const { make, widthOf, rankColour, ticks, logTicks } = clipxTools;
  const { axes, ranks, styles, charts } = JSON.parse(document.getElementById("parallel").textContent);
  const group = clipxCharts.groups[charts], runs = ranks.map((_, r) => r), id = r => `r${r}`, best = ranks.indexOf(1);
  const rows = runs.map(r => document.querySelector(`tr[data-run="${id(r)}"]`));
  const order = [...runs].sort((a, b) => (ranks[a] ?? -1) - (ranks[b] ?? -1)); // the best on top
  const LINE = 16, TALL = 300, PAD = 14, LEAST = 60, BETWEEN = 46;
  const brushes = axes.map(() => null), picked = new Set();
  const head = make("div", { class: "head" }, place);
  const note = make("p", { class: "muted" }, head);
  const clear = make("button", { type: "button", class: "small", hidden: "" }, head, "select all");
  const svg = make("svg", { tabindex: "0", role: "group", "aria-label": "parallel coordinates: arrow keys highlight the runs in the order of the table, Enter selects one, Escape selects all" }, place);
  place.classList.toggle("many", runs.length > 60);
  const tip = make("div", { class: "tip", hidden: "", role: "status" }, place);
  let upright, width, boxes, lines = [], chosen = null;

  const sum = (values, by) => values.reduce((a, b) => a + b, 0) + by * (values.length - 1);
  const labelsOf = axis => { // ascending [place from 0 to 1, text]: the values, or round numbers
    if (axis.labels) return [...axis.labels].sort(([a], [b]) => a - b).map(([p, s]) => [p, s.length > 18 ? `${s.slice(0, 17)}…` : s]);
    const [low, high] = axis.range, scale = axis.log ? Math.log : v => v;
    const found = axis.log ? logTicks(low, high, 8) : ticks(low, high, 5);
    return found.map(([v, text]) => [(scale(v) - scale(low)) / (scale(high) - scale(low)), text]);
  };
  const wrapped = (name, most) => {
    const found = [""];
    for (const part of name.split(/(?<=[/_ ])|(?=\.)/)) {
      if (found.at(-1) && 1.08 * widthOf(found.at(-1) + part, svg) > most) found.push(""); // the name is bold
      found[found.length - 1] += part;
    }
    return found;
  };
  // Returns places with a label each, moved apart where labels would overlap.
  const apart = (places, size, whole) => {
    const found = [...places];
    for (let i = 1; i < found.length; i++) found[i] = Math.max(found[i], found[i - 1] + size);
    for (let i = found.length - 1, end = whole; i >= 0; end = found[i] - size, i--) found[i] = Math.min(found[i], end);
    return found;
  };
  // Returns the pixel along the axis of each run. Equal runs fan out, better ones above.
  const fanned = (axis, long) => {
    const found = [], equal = new Map();
    for (const r of order) if (axis.at[r] !== null) equal.set(axis.at[r], [...equal.get(axis.at[r]) ?? [], r]);
    const keys = [...equal.keys()].sort((a, b) => a - b);
    const gap = long * Math.min(.15, ...keys.slice(1).map((p, i) => .7 * (p - keys[i])));
    for (const [p, same] of equal) {
      const wide = Math.min(5 * (same.length - 1), gap), first = Math.max(2 - PAD, Math.min(long + PAD - 2 - wide, p * long - wide / 2));
      same.forEach((r, k) => { found[r] = first + wide * k / Math.max(1, same.length - 1); });
    }
    return found;
  };
  // Returns the boxes of the axes: `from` and `size` across the lines, `long` along the axis.
  const measure = () => {
    const labels = axes.map(labelsOf), wide = labels.map(l => 12 + Math.max(20, ...l.map(([, text]) => widthOf(text, svg))));
    upright = sum(wide, LEAST) <= width;
    const long = upright ? TALL : width - 2 * PAD, between = (width - sum(wide, 0)) / Math.max(1, axes.length - 1);
    let at = 0;
    return axes.map((axis, i) => {
      const box = { long, places: fanned(axis, long), name: wrapped(axis.name, (upright ? wide[i] + between : width) - 12) };
      if (upright) {
        const alongs = apart(labels[i].map(([p]) => p * long), LINE, long + PAD - LINE / 2);
        Object.assign(box, { from: at, size: wide[i], labels: labels[i].map(([, text], k) => [wide[i] / 2, alongs[k], text]) });
        at += wide[i] + between;
        return box;
      }
      const ends = [], below = LINE * box.name.length + 2; // of the labels in each line, as many lines as they need
      box.labels = labels[i].map(([p, text]) => {
        const half = widthOf(text, svg) / 2 + 5, along = Math.min(long + PAD - half, Math.max(half - PAD, p * long));
        const free = ends.findIndex(end => end <= along - half), line = free < 0 ? ends.length : free;
        ends[line] = along + half;
        return [below + LINE * (line + .5), along, text];
      });
      box.from = at;
      box.size = below + 4 + LINE * Math.max(1, ends.length);
      at += box.size + (i < axes.length - 1 ? BETWEEN : 0);
      return box;
    });
  };

  const draw = () => {
    width = place.clientWidth;
    if (!width) return;
    boxes = measure();
    place.classList.toggle("upright", upright);
    const top = upright ? LINE * Math.max(...boxes.map(box => box.name.length)) + 4 : 0, last = boxes.at(-1);
    const xy = (box, across, along) => (upright ? [box.from + across, top + PAD + TALL - along] : [PAD + along, box.from + across]).map(v => +v.toFixed(1));
    const rect = (box, low, high, kind) => {
      const [x, y] = xy(box, 0, upright ? high : low);
      return make("rect", { x, y, width: upright ? box.size : high - low, height: upright ? high - low : box.size, rx: 4, class: kind }, svg);
    };
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${upright ? top + TALL + 2 * PAD : last.from + last.size}`);
    for (const r of order) {
      const d = boxes.slice(1).map((b, k) => boxes[k].places[r] === undefined || b.places[r] === undefined ? ""
        : `M${xy(boxes[k], boxes[k].size, boxes[k].places[r])}L${xy(b, 0, b.places[r])}`).join("");
      const kind = ranks[r] === null ? " none" : r === best ? " best" : "";
      const colour = ranks[r] === null ? "var(--muted)" : styles ? `var(--c${styles[r] % 12})` : rankColour(ranks[r]);
      lines[r] = make("path", { d, class: `run${kind}`, style: `stroke:${colour}` }, svg);
    }
    boxes.forEach((box, i) => {
      rect(box, -PAD, box.long + PAD, "axis");
      box.name.forEach((line, k) => {
        const y = upright ? top - 6 - LINE * (box.name.length - 1 - k) : box.from + LINE * (k + .8);
        const name = make("text", { x: 6, y, class: "name", "text-anchor": upright ? "middle" : "start" }, svg, line), half = name.getBBox().width / 2 + 1;
        if (upright) name.setAttribute("x", Math.max(half, Math.min(width - half, box.from + box.size / 2)));
      });
      for (const [across, along, text] of box.labels) {
        const [x, y] = xy(box, across, along);
        make("text", { x, y: y + 4.5, class: "label", "text-anchor": "middle" }, svg, text);
      }
      if (brushes[i]) rect(box, brushes[i][0] * box.long, brushes[i][1] * box.long, "brush");
      const area = rect(box, -PAD, box.long + PAD, "area");
      make("title", {}, area, "drag to select a range, click to remove it");
      area.onpointerdown = e => brush(e, i);
    });
    svg.top = top;
    show();
  };
  // Returns the place of an event: across the lines, and along the axes, in pixels.
  const where = e => {
    const box = svg.getBoundingClientRect(), x = e.clientX - box.left, y = e.clientY - box.top;
    return upright ? [x, svg.top + PAD + TALL - y] : [y, x - PAD];
  };
  const brush = (e, i) => {
    const value = f => Math.min(1, Math.max(0, where(f)[1] / boxes[i].long)), start = value(e), stop = new AbortController();
    const on = (kind, react) => addEventListener(kind, react, { signal: stop.signal });
    on("pointermove", f => { brushes[i] = [Math.min(start, value(f)) - .004, Math.max(start, value(f)) + .004]; tip.hidden = true; draw(); });
    on("pointerup", f => { stop.abort(); if (Math.abs(value(f) - start) < .012) brushes[i] = null; draw(); });
    on("pointercancel", () => stop.abort());
    e.preventDefault();
  };

  const inRanges = r => axes.every(({ at }, i) => !brushes[i] || (at[r] !== null && at[r] >= brushes[i][0] && at[r] <= brushes[i][1]));
  const matches = r => inRanges(r) && (!picked.size || picked.has(r));
  const show = () => {
    const filtered = picked.size > 0 || brushes.some(b => b), selected = runs.filter(matches), ids = new Set(selected.map(id));
    const missing = ranks.includes(null) ? "; dashed: without a value" : "";
    note.textContent = filtered ? `${selected.length} of ${runs.length} runs are selected.`
      : `A line for each of ${runs.length} runs, the best one wide${missing}. Drag on an axis, or click on a line, to select.`;
    clear.hidden = !filtered;
    for (const r of runs) {
      lines[r].classList.toggle("off", !ids.has(id(r)));
      lines[r].classList.toggle("chosen", r === chosen);
      if (!rows[r]) continue;
      rows[r].hidden = !ids.has(id(r));
      rows[r].classList.toggle("chosen", r === chosen);
    }
    if (chosen !== null) svg.insertBefore(lines[chosen], svg.querySelector(".axis"));
    const filter = filtered ? ids : null, text = filter && [...filter].join();
    if (group && (group.filter && [...group.filter].join()) !== text) { group.filter = filter; group.draw(); }
  };
  const highlight = r => { if (group) group.highlight(r === null ? null : id(r)); else { chosen = r; show(); } };
  document.addEventListener("clipx-highlight", e => { chosen = e.detail === null ? null : +e.detail.slice(1); tip.hidden = true; show(); });
  const pick = r => { if (!picked.delete(r)) picked.add(r); show(); };
  const near = e => {
    const [across, along] = where(e), i = Math.max(0, boxes.findLastIndex(box => box.from <= across));
    const a = boxes[i], b = boxes[i + 1] ?? a, t = Math.min(1, Math.max(0, (across - a.from - a.size) / (b.from - a.from - a.size || 1)));
    let found = null, least = 14;
    for (const r of runs) {
      const d = Math.abs(a.places[r] + (b.places[r] - a.places[r]) * t - along); // NaN without a value
      if (d < least && matches(r)) [found, least] = [r, d];
    }
    return found;
  };
  const describe = r => {
    const names = rows[r].closest("table").tHead.rows[0].cells;
    tip.replaceChildren();
    make("div", { class: "where" }, tip, rows[r].cells[0].textContent);
    for (let k = 1; k <= axes.length + 1; k++) {
      const row = make("div", { class: "value" }, tip);
      make("span", {}, row, names[k].textContent);
      make("b", {}, row, rows[r].cells[k].textContent);
    }
    tip.hidden = false;
  };
  svg.addEventListener("pointermove", e => {
    if (e.buttons) return;
    const r = near(e), box = place.getBoundingClientRect(), x = e.clientX - box.left;
    highlight(r);
    if (r === null || !rows[r]) { tip.hidden = true; return; }
    describe(r);
    const wide = tip.offsetWidth;
    tip.style.left = `${Math.max(0, x > box.width / 2 ? x - wide - 16 : Math.min(x + 16, box.width - wide))}px`;
    tip.style.top = `${upright ? svg.getBoundingClientRect().top - box.top + svg.top : e.clientY - box.top + 20}px`;
  });
  svg.addEventListener("click", e => { const r = near(e); if (r !== null && !e.target.matches(".area")) pick(r); });
  svg.addEventListener("keydown", e => {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[e.key];
    const known = [...rows].filter(Boolean).sort((a, b) => a.rowIndex - b.rowIndex).map(row => rows.indexOf(row)).filter(inRanges);
    if (e.key === "Escape") clear.onclick();
    if ((e.key === "Enter" || e.key === " ") && chosen !== null) pick(chosen);
    if (step || e.key === "Enter" || e.key === " ") e.preventDefault();
    if (!step || !known.length) return;
    const i = known.indexOf(chosen);
    highlight(known[i < 0 ? (step > 0 ? 0 : known.length - 1) : (i + step + known.length) % known.length]);
    describe(chosen);
    tip.style.left = "0";
    tip.style.top = `${svg.getBoundingClientRect().bottom - place.getBoundingClientRect().top}px`;
  });
  const leave = () => { tip.hidden = true; highlight(null); };
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  rows.forEach((row, r) => {
    row?.addEventListener("pointerenter", () => highlight(r));
    row?.addEventListener("pointerleave", () => highlight(null));
  });
  clear.onclick = () => { brushes.fill(null); picked.clear(); draw(); };
  new ResizeObserver(() => { if (place.clientWidth !== width) draw(); }).observe(place);
})();
