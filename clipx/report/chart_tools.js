// Tools of charts: elements, numbers as text, ticks of axes, search and smoothing.
const clipxTools = (() => {
  const frame = document.createElement("template");
  frame.innerHTML = "<svg></svg>";
  const NS = frame.content.firstChild.namespaceURI;
  const make = (tag, attributes, parent, words) => {
    const e = ["svg", "g", "path", "line", "rect", "circle", "text", "title"].includes(tag)
      ? document.createElementNS(NS, tag) : document.createElement(tag);
    for (const name in attributes) if (attributes[name] !== null) e.setAttribute(name, attributes[name]);
    if (words !== undefined) e.textContent = words;
    if (parent) parent.append(e);
    return e;
  };

  const trim = s => s.includes(".") && !s.includes("e") ? s.replace(/\.?0+$/, "") : s;
  const short = v => {
    const a = Math.abs(v);
    for (const [unit, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]])
      if (a >= 1e4 && a >= size) return trim((v / size).toPrecision(4)) + unit;
    if (a !== 0 && a < 1e-3) return v.toExponential(2).replace(/\.?0+e/, "e");
    return a >= 1e4 ? String(Math.round(v)) : trim(v.toPrecision(4));
  };
  // Text of a tick of an axis with such steps, whose largest value is `most`.
  const tickText = (v, step, most) => {
    if (v === 0) return "0";
    if (most < .01) return v.toExponential(2).replace(/\.?0+e/, "e");
    if (most >= 1e4) return short(v);
    return v.toFixed(Math.max(0, Math.min(6, Math.ceil(-Math.log10(step) - 1e-9))));
  };
  const clock = s => {
    const t = Math.round(s), two = n => String(n).padStart(2, "0");
    return `${Math.floor(t / 3600)}:${two(Math.floor(t / 60) % 60)}:${two(t % 60)}`;
  };
  const niceStep = raw => {
    const power = 10 ** Math.floor(Math.log10(raw)), m = raw / power;
    return power * (m <= 1 ? 1 : m <= 2 ? 2 : m <= 5 ? 5 : 10);
  };
  const ticks = (low, high, most) => {
    if (!(high > low)) return [[low], 1];
    const step = niceStep((high - low) / most), found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) found.push(k * step);
    return [found, step];
  };
  const logTicks = (low, high) => {
    const found = [], decades = Math.log10(high / low), parts = decades < 1.5 ? [1, 2, 3, 5, 7] : decades < 4 ? [1, 3] : [1];
    for (let p = Math.floor(Math.log10(low)); p <= Math.log10(high); p += decades > 8 ? 2 : 1)
      for (const m of parts) if (m * 10 ** p >= low * .999 && m * 10 ** p <= high * 1.001) found.push(m * 10 ** p);
    return found.length > 1 ? found : [low, high];
  };
  // Index of the first x >= at.
  const lower = (x, at) => {
    let a = 0, b = x.length;
    while (a < b) { const m = (a + b) >> 1; if (x[m] < at) a = m + 1; else b = m; }
    return a;
  };
  const nearest = (x, at) => {
    const i = lower(x, at);
    return i === 0 ? 0 : i === x.length ? i - 1 : at - x[i - 1] <= x[i] - at ? i - 1 : i;
  };
  const interpolate = (from, to, at) => {
    if (from.length < 2) return to[0] ?? at;
    const i = Math.min(Math.max(lower(from, at), 1), from.length - 1), width = from[i] - from[i - 1];
    return width > 0 ? to[i - 1] + (at - from[i - 1]) / width * (to[i] - to[i - 1]) : to[i];
  };
  // Mean of all values with weights exp(-|distance| / width).
  const smoothed = (x, y, width) => {
    const n = y.length, up = new Float64Array(n), ups = new Float64Array(n), out = new Array(n);
    for (let i = 0, s = 0, w = 0; i < n; i++) {
      const a = i ? Math.exp((x[i - 1] - x[i]) / width) : 0;
      up[i] = s = s * a + y[i]; ups[i] = w = w * a + 1;
    }
    for (let i = n - 1, s = 0, w = 0; i >= 0; i--) {
      const a = i < n - 1 ? Math.exp((x[i] - x[i + 1]) / width) : 0;
      s *= a; w *= a;
      out[i] = (up[i] + s) / (ups[i] + w);
      s += y[i]; w += 1;
    }
    return out;
  };
  // Colour of a run between the worst, 0, and the best, 1.
  const rankColour = rank => `color-mix(in oklab, var(--best) ${Math.round(100 * rank)}%, var(--worst))`;
  return { make, trim, short, tickText, clock, ticks, logTicks, lower, nearest, interpolate, smoothed, rankColour };
})();
