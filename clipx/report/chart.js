// Charts of report.chart: hover for the values at a place, drag to select a range, double-click to show all.
// The charts of a group share the horizontal axis, the range and the crosshair. Places are numbers of samples; the other
// horizontal axes are interpolated from them.
const clipxCharts = (() => {
  const { make, trim, short, tickText, clock, ticks, logTicks, lower, nearest, interpolate, smoothed, rankColour } = clipxTools;
  const DASHES = [null, "6 3", "2 2", "7 3 2 3"];
  const HEIGHT = 220, TOP = 10, RIGHT = 12, BOTTOM = 24, MOST_SHOWN = 10;

  // ------------------------------------------------------------------------------------------------- group
  class Group {
    constructor(data) {
      this.data = data;
      this.charts = [];
      this.axis = "samples";
      this.zoom = this.run = this.filter = null;
      this.smoothing = 0;
      for (const chart of data.charts) for (const s of chart.series) {
        s.x = data.places[s.x];
        if (s.mean_x !== undefined) s.mean_x = data.places[s.mean_x];
      }
      const xs = data.charts.flatMap(c => c.series).filter(s => s.x.length).map(s => [s.x[0], s.x.at(-1)]);
      this.all = xs.length ? [Math.min(...xs.map(v => v[0])), Math.max(...xs.map(v => v[1]))] : [0, 1];
      this.all[0] = Math.min(0, this.all[0]);
      if (!(this.all[1] > this.all[0])) this.all[1] = this.all[0] + (Math.abs(this.all[0]) || 1);
      const seconds = data.axes.seconds, total = seconds ? seconds.at(-1) - seconds[0] : 0;
      [this.timeUnit, this.timeSize] = total > 7200 ? ["hours", 3600] : total > 180 ? ["minutes", 60] : ["seconds", 1];
    }
    get range() { return this.zoom ?? this.all; }
    toAxis(x) {
      if (this.axis === "samples") return x;
      const v = interpolate(this.data.axes.samples, this.data.axes[this.axis], x);
      return this.axis === "seconds" ? v / this.timeSize : v;
    }
    fromAxis(v) {
      if (this.axis === "samples") return v;
      const raw = this.axis === "seconds" ? v * this.timeSize : v;
      return interpolate(this.data.axes[this.axis], this.data.axes.samples, raw);
    }
    axisName() { return { samples: "samples seen", step: "steps", seconds: `${this.timeUnit} of training` }[this.axis]; }
    describe(x) {
      const at = name => interpolate(this.data.axes.samples, this.data.axes[name], x), known = this.data.axes;
      const parts = [`${Math.round(x).toLocaleString("en")} samples`];
      if (known.step) parts.push(`step ${Math.round(at("step")).toLocaleString("en")}`);
      if (known.epoch) parts.push(`epoch ${at("epoch").toFixed(2)}`);
      if (known.seconds) parts.push(clock(at("seconds")));
      return parts.join(" · ");
    }
    setZoom(range) {
      const least = 1e-6 * (this.all[1] - this.all[0]);
      this.zoom = range && range[1] - range[0] > least ? range : null;
      this.draw();
      for (const place of document.querySelectorAll(".controls button.reset")) place.hidden = !this.zoom;
    }
    draw() { for (const chart of this.charts) chart.draw(); }
    cursor(x, active, y) { for (const chart of this.charts) chart.showCursor(x, chart === active, y); }
    highlight(run) {
      if (this.run === run) return;
      this.run = run;
      for (const chart of this.charts) chart.dim();
      document.dispatchEvent(new CustomEvent("clipx-highlight", { detail: run }));
    }
  }

  // ------------------------------------------------------------------------------------------------- chart
  class Chart {
    constructor(place, group, data) {
      Object.assign(this, { place, group, data, log: !!data.log, hidden: new Set() });
      const head = make("div", { class: "head" }, place);
      make("figcaption", {}, head, data.title);
      if (data.series.some(s => s.y.some(v => v > 0)) && !data.share) {
        const button = make("button", { type: "button", class: "small", "aria-pressed": this.log }, head, "log");
        button.onclick = () => { this.log = !this.log; button.setAttribute("aria-pressed", this.log); this.draw(); };
      }
      this.svg = make("svg", { class: "plot", role: "img", tabindex: "0", "aria-label": `${data.title}: arrow keys move the crosshair, Escape shows all` }, place);
      this.tip = make("div", { class: "tip", hidden: "" }, place);
      this.legend = make("div", { class: "keys" }, place);
      if (data.legend) data.series.forEach((s, i) => this.addKey(s, i));
      this.listen();
      new ResizeObserver(() => { if (place.clientWidth !== this.width) this.draw(); }).observe(place);
    }
    colour(s) { return s.rank === undefined ? `var(--c${s.style % 12})` : rankColour(s.rank); }
    addKey(s, i) {
      const key = make("button", { type: "button", "aria-pressed": "true", title: "show or hide this series" }, this.legend);
      const mark = make("svg", { viewBox: "0 0 18 8", class: "swatch" }, key);
      make("path", { d: "M0 4H18", style: `stroke:${this.colour(s)}`, "stroke-width": 2.5, "stroke-dasharray": DASHES[Math.floor(s.style / 12) % 4] }, mark);
      make("span", {}, key, s.name);
      s.shown = make("output", {}, key);
      key.onclick = () => {
        if (!this.hidden.delete(i)) this.hidden.add(i);
        key.setAttribute("aria-pressed", !this.hidden.has(i));
        this.draw();
      };
    }
    text(v) { return this.data.share ? `${trim((100 * v).toPrecision(4))} %` : short(v); }
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
    extent(series, [from, to]) {
      if (this.data.limits && !this.log && !this.group.zoom && !this.group.filter) return this.data.limits;
      let low = Infinity, high = -Infinity;
      const scan = whole => {
        for (const s of series) s.y.forEach((v, i) => {
          if ((!whole && (s.x[i] < from || s.x[i] > to)) || (this.log && v <= 0)) return;
          const half = this.log ? 0 : s.half?.[i] ?? 0;
          low = Math.min(low, v - half); high = Math.max(high, v + half);
        });
      };
      scan(false);
      if (low > high) scan(true);
      if (low > high) [low, high] = this.log ? [1, 10] : [0, 1];
      if (this.log) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
      if (this.data.zero) low = Math.min(0, low);
      const margin = .05 * (high - low) || .1 * Math.abs(high) || 1;
      const floor = low >= 0 && low - margin < 0;
      return [floor ? 0 : low - margin, this.data.share && high <= 1 ? Math.min(1.02, high + margin) : high + margin];
    }
    draw() {
      const { svg, group, data } = this, width = this.width = this.place.clientWidth;
      if (!width) return;
      svg.replaceChildren();
      svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      this.tip.hidden = true;
      const series = this.visible(), [from, to] = group.range, [low, high] = this.extent(series, [from, to]);
      const [yTicks, yStep] = this.log ? [logTicks(low, high), 1] : ticks(low, high, 5);
      const names = yTicks.map(v => data.share ? `${trim((100 * v).toFixed(2))} %` : this.log ? short(v) : tickText(v, yStep, Math.max(Math.abs(low), Math.abs(high))));
      this.left = 12 + 6.4 * Math.max(3, ...names.map(n => n.length));
      const inner = width - this.left - RIGHT, tall = HEIGHT - TOP - BOTTOM;
      const a = group.toAxis(from), b = group.toAxis(to);
      this.px = x => this.left + (group.toAxis(x) - a) / (b - a || 1) * inner;
      this.at = px => group.fromAxis(a + (px - this.left) / inner * (b - a));
      const scale = this.log ? v => Math.log(v / low) / Math.log(high / low) : v => (v - low) / (high - low);
      this.py = v => TOP + tall * (1 - scale(v));
      yTicks.forEach((v, i) => {
        const y = this.py(v);
        make("line", { x1: this.left, x2: width - RIGHT, y1: y, y2: y, class: "grid" }, svg);
        make("text", { x: this.left - 6, y: y + 3.5, class: "tick", "text-anchor": "end" }, svg, names[i]);
      });
      this.drawPlaces(svg, a, b, inner);
      // A nested svg clips what lies outside the range.
      const box = { x: this.left - 4, y: 0, width: inner + 8, height: HEIGHT - BOTTOM + 3 };
      const plot = make("svg", { ...box, viewBox: Object.values(box).join(" "), class: "clip" }, svg);
      for (const [x, words] of group.data.marks) {
        if (x < from || x > to) continue;
        const mark = make("line", { x1: this.px(x), x2: this.px(x), y1: TOP - 6, y2: TOP + tall, class: "mark" }, plot);
        make("title", {}, mark, words);
      }
      this.drawn = [];
      for (const s of series) this.drawSeries(plot, s);
      if (!series.length) make("text", { x: this.left + inner / 2, y: HEIGHT / 2, class: "tick", "text-anchor": "middle" }, svg, "no data");
      this.over = make("g", {}, svg);
      this.dim();
      for (const s of series) if (s.shown) s.shown.textContent = this.text(s.y.at(-1));
    }
    drawPlaces(svg, a, b, inner) {
      const [xTicks, xStep] = ticks(a, b, Math.max(2, Math.floor(inner / 95)));
      for (const v of xTicks) {
        const x = this.left + (v - a) / (b - a || 1) * inner;
        make("line", { x1: x, x2: x, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4, class: "grid" }, svg);
        make("text", { x, y: HEIGHT - BOTTOM + 15, class: "tick", "text-anchor": "middle" }, svg, tickText(v, xStep, Math.abs(b)));
      }
    }
    drawSeries(plot, s) {
      const g = make("g", { class: "series", style: `--c:${this.colour(s)}` }, plot);
      this.drawn.push([g, s]);
      if (s.half) make("path", { d: this.band(s), class: "band" }, g);
      const [x, y] = this.line(s), isSmooth = y !== s.y;
      if (isSmooth && !this.group.data.each) make("path", { d: this.path(s.x, s.y), class: "raw" }, g);
      make("path", { d: this.path(x, y), class: "line", "stroke-dasharray": DASHES[Math.floor(s.style / 12) % 4] }, g);
      const [from, to] = this.group.range, first = lower(s.x, from), last = lower(s.x, to);
      if (last - first < 40 && !isSmooth && !this.group.data.each) for (let i = first; i < s.x.length && s.x[i] <= to; i++)
        if (!this.log || s.y[i] > 0) make("circle", { cx: this.px(s.x[i]), cy: this.py(s.y[i]), r: 2.4 }, g);
      for (const bad of s.bad ?? []) {
        const mark = make("path", { d: `M${this.px(bad)} ${HEIGHT - BOTTOM - 9}l-4 8h8z`, class: "bad" }, g);
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
      const least = this.log ? this.extent([s], this.group.range)[0] : -Infinity, points = (sign, i) =>
        `${this.px(s.x[i]).toFixed(1)} ${this.py(Math.max(least, s.y[i] + sign * s.half[i])).toFixed(1)}`;
      const order = s.x.map((_, i) => i);
      return `M${order.map(i => points(1, i)).join("L")}L${order.reverse().map(i => points(-1, i)).join("L")}Z`;
    }
    dim() {
      for (const [g, s] of this.drawn ?? []) {
        const chosen = s.run !== undefined && s.run === this.group.run;
        g.classList.toggle("dim", this.group.run !== null && s.run !== undefined && !chosen);
        g.classList.toggle("chosen", chosen);
        if (chosen) g.parentNode.append(g);
      }
    }
    // ------------------------------------------------------------------------------------------- pointer
    listen() {
      const { svg, group } = this;
      let start = null, box = null;
      const place = e => e.clientX - svg.getBoundingClientRect().left;
      const move = e => {
        const x = Math.min(Math.max(place(e), this.left), this.width - RIGHT);
        if (start !== null && Math.abs(x - start) > 4) {
          box ??= make("rect", { class: "select", y: TOP, height: HEIGHT - TOP - BOTTOM }, svg);
          box.setAttribute("x", Math.min(start, x));
          box.setAttribute("width", Math.abs(x - start));
        }
        group.cursor(this.at(x), this, e.clientY - svg.getBoundingClientRect().top);
      };
      svg.addEventListener("pointerdown", e => {
        if (e.button) return;
        start = Math.min(Math.max(place(e), this.left), this.width - RIGHT);
        svg.setPointerCapture(e.pointerId);
        move(e);
      });
      svg.addEventListener("pointermove", move);
      svg.addEventListener("pointerup", e => {
        const x = Math.min(Math.max(place(e), this.left), this.width - RIGHT);
        const range = box && [this.at(Math.min(start, x)), this.at(Math.max(start, x))];
        start = box = null;
        if (range) group.setZoom(range);
      });
      svg.addEventListener("pointercancel", () => { box?.remove(); start = box = null; });
      svg.addEventListener("pointerleave", e => { if (e.pointerType === "mouse" && start === null) this.leave(); });
      svg.addEventListener("dblclick", () => group.setZoom(null));
      svg.addEventListener("blur", () => this.leave());
      svg.addEventListener("keydown", e => {
        const [from, to] = group.range, step = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
        if (e.key === "Escape") group.setZoom(null);
        if (!step) return;
        e.preventDefault();
        this.spot = Math.min(to, Math.max(from, (this.spot ?? from) + step * (to - from) / 50));
        group.cursor(this.spot, this, HEIGHT / 3);
      });
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
      if (x === null) {
        for (const s of series) if (s.shown) s.shown.textContent = this.text(s.y.at(-1));
        return;
      }
      const found = series.map(s => {
        const [lx, ly] = this.line(s), i = nearest(lx, x), raw = nearest(s.x, lx[i]);
        return { s, x: lx[i], v: ly[i], half: ly === s.y ? s.half?.[i] : undefined, raw: ly === s.y ? null : s.y[raw] };
      });
      const closest = found.reduce((best, p) => best === null || Math.abs(p.x - x) < Math.abs(best.x - x) ? p : best, null);
      const at = closest && active ? closest.x : x, px = this.px(at);
      make("line", { x1: px, x2: px, y1: TOP, y2: HEIGHT - BOTTOM, class: "cross" }, this.over);
      const distance = p => Math.abs(this.py(p.v) - y);
      const several = this.group.data.each && found.length > 1;
      const order = several && active ? [...found].sort((p, q) => distance(p) - distance(q)) : found;
      if (several && active) this.group.highlight(order[0].s.run ?? null);
      for (const p of several ? order.filter(q => q.s.run === this.group.run) : found) {
        if (p.s.shown) p.s.shown.textContent = this.text(p.v);
        if (!this.log || p.v > 0) make("circle", { cx: this.px(p.x), cy: this.py(p.v), r: 4, class: "dot", style: `--c:${this.colour(p.s)}` }, this.over);
      }
      if (active) this.showTip(order, at, px);
    }
    showTip(found, at, px) {
      const { tip, group } = this;
      tip.replaceChildren();
      make("div", { class: "where" }, tip, group.describe(at));
      for (const [x, words] of group.data.marks) if (Math.abs(this.px(x) - px) < 5) make("div", { class: "event" }, tip, words);
      const most = group.data.each ? 5 : MOST_SHOWN;
      for (const p of found.slice(0, most)) {
        const row = make("div", { class: "value" }, tip);
        make("i", { style: `background:${this.colour(p.s)}` }, row);
        make("span", {}, row, p.s.name);
        const far = Math.abs(this.px(p.x) - px) > 12 ? ` at ${short(p.x)}` : "";
        const raw = p.raw === null ? "" : ` (${this.text(p.raw)})`;
        make("b", {}, row, this.text(p.v) + (p.half ? ` ± ${this.text(p.half)}` : "") + raw + far);
      }
      if (found.length > most) make("div", { class: "where" }, tip, `and ${found.length - most} further`);
      tip.hidden = false;
      const right = px > this.width / 2, gap = 14;
      tip.style.maxWidth = `${Math.max(150, this.width - 20)}px`;
      const wide = tip.offsetWidth, wanted = right ? px - gap - wide : px + gap;
      tip.style.left = `${Math.min(Math.max(0, wanted), Math.max(0, this.width - wide))}px`;
      tip.style.top = `${this.svg.getBoundingClientRect().top - this.place.getBoundingClientRect().top + TOP}px`;
    }
  }

  // ------------------------------------------------------------------------------------------------ controls
  const addControls = (place, group) => {
    const axes = Object.keys(group.data.axes).filter(name => name !== "epoch");
    if (axes.length > 1) {
      const label = make("label", {}, place, "horizontal axis ");
      const select = make("select", {}, label);
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
    const reset = make("button", { type: "button", class: "small reset", hidden: "" }, place, "show all");
    reset.onclick = () => group.setZoom(null);
    make("span", { class: "muted" }, place, "Drag over a chart to enlarge a range, double-click to show all.");
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
