// Charts of report.chart: hover for the values at a place, drag to select a range, double-click to show all; arrow keys,
// Home and End move from point to point, + and - zoom, Escape shows all. The charts of a group share the horizontal axis,
// the range and the crosshair. Places are values of x, such as samples; further horizontal axes are interpolated from them.
const clipxCharts = (() => {
  const { make, widthOf, number, percent, clock, ticks, logTicks, lower, nearest, interpolate, smoothed, rankColour } = clipxTools;
  const DASHES = [null, "6 3", "2 2", "7 3 2 3"];
  const PLOT = 186, TOP = 10, RIGHT = 12, LINE = 16, MOST_ROWS = 3, MOST_SHOWN = 10; // pixels; rows of labels; series in a tip
  const KEYS = "arrow keys, Home and End move to a point, + and − zoom, Escape shows all";
  const clamp = (v, low, high) => Math.max(low, Math.min(high, v));

  class Group {
    constructor(data) {
      Object.assign(this, { data, charts: [], axis: "samples", zoom: null, run: null, filter: null, spot: null, smoothing: 0 });
      const series = data.charts.flatMap(c => c.series);
      for (const s of series) {
        s.x = data.places[s.x];
        if (s.mean_x !== undefined) s.mean_x = data.places[s.mean_x];
      }
      const xs = [...series.filter(s => s.x.length).flatMap(s => [s.x[0], s.x.at(-1)]), ...data.xTicks.map(([x]) => x)];
      const [low, high] = xs.length ? [Math.min(...xs), Math.max(...xs)] : [0, 1];
      if (data.xName === "samples") this.all = [Math.min(0, low), high > Math.min(0, low) ? high : low + (Math.abs(low) || 1)];
      else {
        const [a, b] = [this.toAxis(low), this.toAxis(high)], margin = .06 * (b - a) || .5;
        this.all = [this.fromAxis(a - margin), this.fromAxis(b + margin)];
      }
      const seconds = data.axes.seconds, total = seconds ? seconds.at(-1) - seconds[0] : 0;
      [this.timeUnit, this.timeSize] = total > 7200 ? ["hours", 3600] : total > 180 ? ["minutes", 60] : ["seconds", 1];
    }
    get range() { return this.zoom ?? this.all; }
    toAxis(x) {
      if (this.axis === "samples") return this.data.xLog ? Math.log10(x) : x;
      const v = interpolate(this.data.axes.samples, this.data.axes[this.axis], x);
      return this.axis === "seconds" ? v / this.timeSize : v;
    }
    fromAxis(v) {
      if (this.axis === "samples") return this.data.xLog ? 10 ** v : v;
      const raw = this.axis === "seconds" ? v * this.timeSize : v;
      return interpolate(this.data.axes[this.axis], this.data.axes.samples, raw);
    }
    axisName() {
      const samples = this.data.xName === "samples" ? "samples seen" : this.data.xName;
      return { samples, step: "steps", seconds: `${this.timeUnit} of training` }[this.axis];
    }
    describe(x) {
      const known = this.data.axes, at = name => interpolate(known.samples, known[name], x);
      if (this.data.xName !== "samples")
        return `${this.data.xName} ${this.data.xTicks.find(([place]) => place === x)?.[1] ?? number(x)}`;
      const parts = [`${number(Math.round(x))} samples`];
      if (known.step) parts.push(`step ${number(Math.round(at("step")))}`);
      if (known.epoch) parts.push(`epoch ${at("epoch").toFixed(2)}`);
      if (known.seconds) parts.push(clock(at("seconds")));
      return parts.join(" · ");
    }
    setZoom(range) {
      const [low, high] = this.all, wide = ([a, b]) => this.toAxis(b) - this.toAxis(a);
      const inside = range && [Math.max(low, range[0]), Math.min(high, range[1])];
      if (!inside || wide(inside) > .9999 * wide(this.all)) this.zoom = null;
      else if (wide(inside) > 1e-6 * wide(this.all)) this.zoom = inside;
      this.draw();
    }
    // Makes the range `factor` times as wide, a narrower one around the crosshair.
    zoomBy(factor) {
      const [a, b] = this.range.map(x => this.toAxis(x));
      const centre = this.spot === null || factor > 1 ? (a + b) / 2 : clamp(this.toAxis(this.spot), a, b);
      this.setZoom([a, b].map(v => this.fromAxis(centre + factor * (v - centre))));
    }
    // Moves the crosshair to a place, and the range with it.
    show(x) {
      const [a, b, at] = [...this.range, this.spot = x].map(v => this.toAxis(v)), shift = at - clamp(at, a, b);
      if (shift) this.setZoom([a, b].map(v => this.fromAxis(v + shift)));
    }
    draw() { for (const chart of this.charts) chart.draw(); }
    cursor(x, active, y) {
      this.spot = x;
      for (const chart of this.charts) chart.showCursor(x, chart === active, y);
    }
    highlight(run) {
      if (this.run === run) return;
      this.run = run;
      for (const chart of this.charts) chart.dim();
      document.dispatchEvent(new CustomEvent("clipx-highlight", { detail: run }));
    }
  }

  class Chart {
    constructor(place, group, data) {
      Object.assign(this, { place, group, data, log: !!data.log, hidden: new Set() });
      const head = make("div", { class: "head" }, place);
      make("figcaption", {}, head, data.title);
      this.reset = make("button", { type: "button", class: "small reset", hidden: "" }, head, "show all");
      this.reset.onclick = () => group.setZoom(null);
      if (data.series.some(s => s.y.some(v => v > 0)) && !data.share) {
        const button = make("button", { type: "button", class: "small", "aria-pressed": this.log }, head, "log");
        button.onclick = () => { this.log = !this.log; button.setAttribute("aria-pressed", this.log); this.draw(); };
      }
      this.svg = make("svg", { class: "plot", role: "img", tabindex: "0", "aria-label": `${data.title}: ${KEYS}` }, place);
      this.tip = make("div", { class: "tip", "aria-live": "polite", hidden: "" }, place);
      if (data.legend) this.addKeys(make("div", { class: "keys" }, place));
      this.listen();
      new ResizeObserver(() => { if (place.clientWidth !== this.width) this.draw(); }).observe(place);
    }
    colour(s) { return s.rank === undefined ? `var(--c${s.style % 12})` : rankColour(s.rank); }
    addKeys(legend) {
      this.data.series.forEach((s, i) => {
        const key = make("button", { type: "button", "aria-pressed": "true", title: "show or hide this series" }, legend);
        const mark = make("svg", { viewBox: "0 0 18 8", class: "swatch", style: `--c:${this.colour(s)}` }, key);
        if (s.points) make("circle", { cx: 9, cy: 4, r: 3.5, class: s.style < 12 ? null : "hollow" }, mark);
        else make("path", { d: "M0 4H18", "stroke-width": 2.5, "stroke-dasharray": DASHES[Math.floor(s.style / 12) % 4] }, mark);
        make("span", {}, key, s.name);
        s.shown = make("output", {}, key);
        key.onclick = () => {
          if (!this.hidden.delete(i)) this.hidden.add(i);
          key.setAttribute("aria-pressed", !this.hidden.has(i));
          this.draw();
        };
      });
    }
    text(v) { return this.data.share ? percent(v) : number(v); }
    visible() {
      return this.data.series.filter((s, i) => !this.hidden.has(i) && s.y.length && !(this.group.filter && s.run && !this.group.filter.has(s.run)));
    }
    // Points of a series that are drawn as its line: smoothed if the page's control asks for it.
    line(s) {
      const g = this.group, strength = this.data.smooth ? g.smoothing : 0;
      if (!strength || s.y.length < 4) return [s.x, s.y];
      const [x, y] = s.mean_x ? [s.mean_x, s.mean_y] : [s.x, s.y];
      if (s.strength !== strength) {
        s.smooth = smoothed(x, y, .1 * strength ** 2 * (g.all[1] - g.all[0]));
        s.strength = strength;
      }
      return [x, s.smooth];
    }
    // Ascending places of all visible points.
    places() { return this.known ??= [...new Set(this.visible().flatMap(s => this.line(s)[0]))].sort((a, b) => a - b); }
    extent(series, [from, to]) {
      if (this.data.limits && !this.log && !this.group.zoom && !this.group.filter) return this.data.limits;
      let low = Infinity, high = -Infinity;
      for (const [first, last] of [[from, to], [-Infinity, Infinity]]) if (low > high) for (const s of series) s.y.forEach((v, i) => {
        if (s.x[i] < first || s.x[i] > last || (this.log && v <= 0)) return;
        const half = s.half?.[i] ?? 0;
        low = Math.min(low, this.log && v <= half ? v : v - half); high = Math.max(high, v + half);
      });
      if (low > high) [low, high] = this.log ? [1, 10] : [0, 1];
      if (this.log) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
      if (this.data.zero) low = Math.min(0, low);
      const margin = .05 * (high - low) || .1 * Math.abs(high) || 1;
      return [low >= 0 ? Math.max(0, low - margin) : low - margin, this.data.share && high <= 1 ? Math.min(1.02, high + margin) : high + margin];
    }
    draw() {
      const { svg, group, data } = this, width = this.width = this.place.clientWidth;
      if (!width) return;
      svg.replaceChildren();
      this.reset.hidden = !group.zoom;
      this.known = undefined;
      const series = this.visible(), [from, to] = group.range, [low, high] = this.extent(series, [from, to]);
      const yTicks = this.log ? logTicks(low, high, 8, data.share) : ticks(low, high, 5, data.share);
      this.left = 10 + Math.max(20, ...yTicks.map(([, name]) => widthOf(name, svg)));
      const inner = width - this.left - RIGHT, a = group.toAxis(from), b = group.toAxis(to);
      const along = v => this.left + (v - a) / (b - a || 1) * inner;
      this.px = x => along(group.toAxis(x));
      this.at = px => group.fromAxis(a + (px - this.left) / inner * (b - a));
      const scale = this.log ? v => Math.log(v / low) / Math.log(high / low) : v => (v - low) / (high - low);
      this.py = v => TOP + PLOT * (1 - scale(Math.max(v, this.log ? low : v)));
      for (const [v, name] of yTicks) {
        const y = this.py(v);
        make("line", { x1: this.left, x2: width - RIGHT, y1: y, y2: y, class: "grid" }, svg);
        make("text", { x: this.left - 6, y: y + 4, class: "tick", "text-anchor": "end" }, svg, name);
      }
      const bottom = TOP + PLOT + 6 + LINE * (this.drawPlaces(along, a, b, inner) + 1);
      svg.setAttribute("viewBox", `0 0 ${width} ${bottom}`);
      svg.style.height = `${bottom}px`; // the same height until it is drawn for another width
      make("text", { x: this.left + inner / 2, y: bottom - 4, class: "tick", "text-anchor": "middle" }, svg, group.axisName());
      // A nested svg clips what lies outside the range.
      const box = { x: this.left - 4, y: 0, width: Math.max(0, inner + 8), height: TOP + PLOT + 3 };
      const plot = make("svg", { ...box, viewBox: Object.values(box).join(" "), class: "clip" }, svg);
      for (const [x, words] of group.data.marks) {
        if (x < from || x > to) continue;
        const mark = make("line", { x1: this.px(x), x2: this.px(x), y1: TOP - 6, y2: TOP + PLOT, class: "mark" }, plot);
        make("title", {}, mark, words);
      }
      this.drawn = [];
      for (const s of series) this.drawSeries(plot, s);
      const empty = !series.length ? "no data" : this.log && !series.some(s => s.y.some(v => v > 0)) ? "no value above 0" : "";
      if (empty) make("text", { x: this.left + inner / 2, y: TOP + .4 * PLOT, class: "tick", "text-anchor": "middle" }, svg, empty);
      this.over = make("g", {}, svg);
      this.dim();
      this.showCursor(null);
    }
    // Draws the labels of the horizontal axis that do not overlap, given ones in up to MOST_ROWS rows. Returns the rows.
    drawPlaces(along, a, b, inner) {
      const { svg, group, width } = this, { xTicks, xLog } = group.data;
      const fit = labels => {
        const ends = [], placed = [];
        for (let [px, words] of labels) {
          while (widthOf(words, svg) > width - 8 && words.length > 2) words = `${words.slice(0, -2)}…`;
          const half = widthOf(words, svg) / 2, centre = clamp(px, half, width - half), free = ends.findIndex(end => end < centre - half - 10);
          const row = free < 0 ? ends.length : free;
          if (row >= (xTicks.length ? MOST_ROWS : 1)) continue;
          ends[row] = centre + half;
          placed.push([px, centre, row, words]);
        }
        return placed;
      };
      let placed = [];
      if (xTicks.length) placed = fit(xTicks.map(([x, words]) => [this.px(x), words]).filter(([px]) => px >= this.left && px <= width));
      else for (let most = Math.floor(inner / 45); most > 0; most--) {
        const labels = xLog ? logTicks(10 ** a, 10 ** b, most).map(([v, words]) => [along(Math.log10(v)), words])
          : ticks(a, b, most).map(([v, words]) => [along(v), words]);
        placed = fit(labels);
        if (placed.length === labels.length) break;
      }
      for (const [px, centre, row, words] of placed) {
        make("line", { x1: px, x2: px, y1: TOP + PLOT, y2: TOP + PLOT + 4 + LINE * row, class: "grid" }, svg);
        make("text", { x: centre, y: TOP + PLOT + LINE * (row + 1), class: "tick", "text-anchor": "middle" }, svg, words);
      }
      return 1 + Math.max(0, ...placed.map(([, , row]) => row));
    }
    // Horizontal offset of the markers of a series beside those of others at the same places, in pixels.
    offset(s) {
      const beside = s.points ? this.visible().filter(other => other.points) : [s];
      return (beside.indexOf(s) - (beside.length - 1) / 2) * Math.min(8, 60 / beside.length);
    }
    drawSeries(plot, s) {
      const g = make("g", { class: "series", style: `--c:${this.colour(s)}` }, plot), offset = this.offset(s);
      this.drawn.push([g, s]);
      if (s.half && !s.points) make("path", { d: this.band(s), class: "band" }, g);
      const [x, y] = this.line(s), isSmooth = y !== s.y;
      if (isSmooth && !this.group.data.each) make("path", { d: this.path(s.x, s.y), class: "raw" }, g);
      if (!s.points) make("path", { d: this.path(x, y), class: "line", "stroke-dasharray": DASHES[Math.floor(s.style / 12) % 4] }, g);
      const [from, to] = this.group.range, first = lower(s.x, from), last = lower(s.x, to);
      if (s.points || (last - first < 40 && !isSmooth && !this.group.data.each)) for (let i = first; i < s.x.length && s.x[i] <= to; i++) {
        if (this.log && !(s.y[i] > 0)) continue;
        const cx = this.px(s.x[i]) + offset, half = s.points && s.half?.[i];
        if (half) make("path", { d: `M${cx} ${this.py(s.y[i] - half)}V${this.py(s.y[i] + half)}`, class: "line" }, g);
        make("circle", { cx, cy: this.py(s.y[i]), r: s.points && s.half ? 4 : 2.8, class: s.points && s.style > 11 ? "hollow" : null }, g);
      }
      for (const bad of s.bad ?? []) {
        const mark = make("path", { d: `M${this.px(bad)} ${TOP + PLOT - 9}l-4 8h8z`, class: "bad" }, g);
        make("title", {}, mark, `${s.name}: ${s.bads} of its values ${s.bads > 1 ? "are" : "is"} nan or inf`);
      }
    }
    path(x, y) {
      const [from, to] = this.group.range, parts = [];
      let pen = "M";
      for (let i = Math.max(0, lower(x, from) - 1); i < x.length; i++) {
        if (this.log && !(y[i] > 0)) { pen = "M"; continue; }
        parts.push(`${pen}${this.px(x[i]).toFixed(1)} ${this.py(y[i]).toFixed(1)}`);
        pen = "L";
        if (x[i] > to) break;
      }
      return parts.join("");
    }
    band(s) {
      const edge = sign => s.x.map((x, i) => `${this.px(x).toFixed(1)} ${this.py(s.y[i] + sign * s.half[i]).toFixed(1)}`);
      return `M${[...edge(1), ...edge(-1).reverse()].join("L")}Z`;
    }
    dim() {
      for (const [g, s] of this.drawn ?? []) {
        const chosen = s.run !== undefined && s.run === this.group.run;
        g.classList.toggle("dim", this.group.run !== null && s.run !== undefined && !chosen);
        g.classList.toggle("chosen", chosen);
        if (chosen) g.parentNode.append(g);
      }
    }
    listen() {
      const { svg, group } = this;
      let start = null, box = null;
      const place = e => clamp(e.clientX - svg.getBoundingClientRect().left, this.left, this.width - RIGHT);
      svg.onpointermove = e => {
        const x = place(e);
        if (start !== null && Math.abs(x - start) > 4) {
          box ??= make("rect", { class: "select", y: TOP, height: PLOT }, svg);
          box.setAttribute("x", Math.min(start, x));
          box.setAttribute("width", Math.abs(x - start));
        }
        group.cursor(this.closest(x), this, e.clientY - svg.getBoundingClientRect().top);
      };
      svg.onpointerdown = e => {
        if (e.button) return;
        start = place(e);
        svg.setPointerCapture(e.pointerId);
        svg.onpointermove(e);
      };
      svg.onpointerup = e => {
        const range = box && [start, place(e)].sort((a, b) => a - b).map(this.at);
        start = box = null;
        if (range) group.setZoom(range);
      };
      svg.onpointercancel = () => { box?.remove(); start = box = null; };
      svg.onpointerleave = e => { if (e.pointerType === "mouse" && start === null) this.leave(); };
      svg.ondblclick = () => group.setZoom(null);
      svg.onblur = () => this.leave();
      svg.onkeydown = e => {
        const xs = this.places(), spot = group.spot, zoom = { "+": .5, "=": .5, "-": 2 }[e.key];
        const next = {
          ArrowRight: lower(xs, spot ?? group.range[0]) + xs.includes(spot), ArrowLeft: lower(xs, spot ?? Infinity) - 1, Home: 0, End: xs.length - 1,
        }[e.key];
        if (e.ctrlKey || e.metaKey || e.altKey) return;
        if (e.key === "Escape") group.setZoom(null);
        else if (zoom) group.zoomBy(zoom);
        else if (next === undefined || !xs.length) return;
        else group.show(xs[clamp(next, 0, xs.length - 1)]);
        e.preventDefault();
        group.cursor(group.spot, this, PLOT / 3);
      };
    }
    // Place of the visible point that is closest to a horizontal position, null if there is none in the range.
    closest(px) {
      const xs = this.places(), i = lower(xs, this.at(px)), [from, to] = this.group.range;
      const found = i && (i === xs.length || px - this.px(xs[i - 1]) <= this.px(xs[i]) - px) ? xs[i - 1] : xs[i];
      return found >= from && found <= to ? found : null;
    }
    leave() {
      this.group.cursor(null);
      if (this.group.data.each) this.group.highlight(null);
    }
    // Shows the crosshair and the values of all series near the place x; with x = null none, and the last values.
    showCursor(x, active, y) {
      if (!this.over) return;
      this.over.replaceChildren();
      this.tip.hidden = true;
      const series = this.visible();
      for (const s of series) if (s.shown) s.shown.textContent = this.text(s.y.at(-1));
      if (x === null) return;
      const found = series.map(s => {
        const [lx, ly] = this.line(s), i = nearest(lx, x), raw = nearest(s.x, lx[i]);
        return { s, x: lx[i], v: ly[i], half: ly === s.y ? s.half?.[i] : undefined, raw: ly === s.y ? null : s.y[raw] };
      });
      const px = this.px(x), distance = p => Math.abs(this.py(p.v) - y);
      make("line", { x1: px, x2: px, y1: TOP, y2: TOP + PLOT, class: "cross" }, this.over);
      const several = this.group.data.each && found.length > 1;
      const order = several && active ? [...found].sort((p, q) => distance(p) - distance(q)) : found;
      if (several && active) this.group.highlight(order[0].s.run ?? null);
      for (const p of several ? order.filter(q => q.s.run === this.group.run) : found) {
        if (p.s.shown) p.s.shown.textContent = this.text(p.v);
        const cx = this.px(p.x) + this.offset(p.s), inside = cx > this.left - 4 && cx < this.width - RIGHT + 4;
        if (inside && (!this.log || p.v > 0)) make("circle", { cx, cy: this.py(p.v), r: 4, class: "dot", style: `--c:${this.colour(p.s)}` }, this.over);
      }
      if (active) this.showTip(order, x, px);
    }
    showTip(found, at, px) {
      const { tip, group } = this, most = group.data.each ? 5 : MOST_SHOWN;
      tip.replaceChildren();
      make("div", { class: "where" }, tip, group.describe(at));
      for (const [x, words] of group.data.marks) if (Math.abs(this.px(x) - px) < 5) make("div", { class: "event" }, tip, words);
      for (const p of found.slice(0, most)) {
        const row = make("div", { class: "value" }, tip);
        make("i", { style: `background:${this.colour(p.s)}` }, row);
        make("span", {}, row, p.s.name);
        const far = Math.abs(this.px(p.x) - px) > 12 ? ` at ${number(p.x)}` : "";
        const raw = p.raw === null ? "" : ` (${this.text(p.raw)})`;
        make("b", {}, row, this.text(p.v) + (p.half ? ` ± ${this.text(p.half)}` : "") + raw + far);
      }
      if (found.length > most) make("div", { class: "where" }, tip, `and ${found.length - most} further`);
      tip.hidden = false;
      tip.style.maxWidth = `${this.width}px`;
      const gap = 14, wide = tip.offsetWidth, narrow = wide > this.width / 2; // below the plot where it would cover it
      tip.style.left = `${clamp(px > this.width / 2 ? px - gap - wide : px + gap, 0, this.width - wide)}px`;
      const top = this.svg.getBoundingClientRect().top - this.place.getBoundingClientRect().top;
      tip.style.top = `${top + TOP + (narrow ? PLOT + 4 : 0)}px`;
    }
  }

  const addControls = (place, group) => {
    const axes = Object.keys(group.data.axes).filter(name => name !== "epoch");
    if (axes.length > 1) {
      const select = make("select", {}, make("label", {}, place, "horizontal axis "));
      for (const name of axes) {
        group.axis = name;
        make("option", { value: name }, select, group.axisName());
      }
      group.axis = "samples";
      select.onchange = () => { group.axis = select.value; group.draw(); };
    }
    const points = Math.max(0, ...group.data.charts.filter(c => c.smooth).flatMap(c => c.series.map(s => s.y.length)));
    if (points >= 20) {
      const label = make("label", {}, place, "smoothing ");
      const range = make("input", { type: "range", min: 0, max: 1, step: .02, value: points > 150 ? .3 : 0 }, label);
      range.oninput = () => { group.smoothing = +range.value; group.draw(); };
      group.smoothing = +range.value;
    }
    make("span", { class: "muted" }, place, `Drag over a chart to enlarge a range, double-click to show all. In a chart, ${KEYS}.`);
  };

  const groups = {};
  for (const script of document.querySelectorAll('script[id^="charts-"]'))
    groups[script.id.slice(7)] = new Group(JSON.parse(script.textContent));
  for (const place of document.querySelectorAll(".controls[data-group]")) addControls(place, groups[place.dataset.group]);
  for (const place of document.querySelectorAll("figure.chart")) {
    const group = groups[place.dataset.group];
    group.charts.push(new Chart(place, group, group.data.charts[+place.dataset.chart]));
  }
  for (const name in groups) groups[name].draw();
  return { groups };
})();
