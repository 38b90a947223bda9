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
  // Width of text in the size and the font of an element, in pixels.
  const pen = document.createElement("canvas").getContext("2d");
  const widthOf = (words, e) => {
    const style = getComputedStyle(e);
    pen.font = `${style.fontSize} ${style.fontFamily}`;
    return pen.measureText(words).width;
  };

  // Numbers as text: `number` and `percent` write values as report.console.format_value does, `tickText` those of an axis.
  const minus = s => s.replace(/-/g, "−");
  const exponent = (v, digits) => minus(v.toExponential(digits).replace(/\.?0+e/, "e").replace("e+", "e"));
  const number = v => {
    const a = Math.abs(v), whole = a >= 1000 || Number.isInteger(v);
    if (a !== 0 && (a < 1e-3 || a >= 1e15)) return exponent(v, 3);
    return minus(v.toLocaleString("en", whole ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 4 }));
  };
  const percent = (v, digits = 2) => minus(`${(100 * v).toFixed(digits)}%`);
  const power = v => Math.floor(Math.log10(Math.abs(v)) + 1e-9);
  // Text of a tick of an axis with such steps, whose largest value is `most`.
  const tickText = (v, step, most, share) => {
    if (share) return percent(v, Math.max(0, -power(100 * step)));
    if (v === 0) return "0";
    const shown = Math.max(1, Math.min(17, power(v) - power(step) + 1));
    if (most < .01 || most >= 1e15) return exponent(v, shown - 1);
    const digits = { minimumSignificantDigits: shown, maximumSignificantDigits: shown };
    return minus(v.toLocaleString("en", { notation: most < 1e4 ? "standard" : "compact", ...digits }).replace("K", "k"));
  };
  const clock = s => {
    const t = Math.round(s), two = n => String(n).padStart(2, "0");
    return `${Math.floor(t / 3600)}:${two(Math.floor(t / 60) % 60)}:${two(t % 60)}`;
  };
  const ticks = (low, high, most, share) => {
    const raw = (high - low) / most || 1, step = [1, 2, 5, 10].find(m => m * 10 ** power(raw) >= .8 * raw) * 10 ** power(raw);
    const first = Math.ceil(low / step - 1e-9), found = Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, k) => (first + k) * step);
    return found.map(v => [v, tickText(v, step, Math.max(Math.abs(low), Math.abs(high)), share)]);
  };
  const logTicks = (low, high, most, share) => {
    const decades = Math.log10(high / low), every = Math.ceil(decades / most), found = [];
    const parts = decades < most / 5 ? [1, 2, 3, 5, 7] : decades < most / 2 ? [1, 3] : [1];
    for (let p = power(low); p <= power(high); p++)
      for (const v of parts.map(m => +`${m}e${p}`)) if (p % every === 0 && v >= low * .999 && v <= high * 1.001) found.push(v);
    return found.length > 2 ? found.map(v => [v, tickText(v, v, low < 1e-3 ? Math.min(v, .009) : v, share)]) : ticks(low, high, 4, share).filter(([v]) => v > 0);
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
    const pass = order => {
      let sum = 0, weight = 0, last = order[0];
      return order.map(i => {
        const kept = Math.exp(-Math.abs(x[i] - x[last]) / width);
        [sum, weight, last] = [sum * kept + y[i], weight * kept + 1, i];
        return [sum, weight];
      });
    };
    const order = [...y.keys()], up = pass(order), down = pass(order.reverse()).reverse();
    return y.map((v, i) => (up[i][0] + down[i][0] - v) / (up[i][1] + down[i][1] - 1));
  };
  // Colour of a run between the worst, 0, and the best, 1.
  const rankColour = rank => `color-mix(in oklab, var(--best) ${Math.round(100 * rank)}%, var(--worst))`;
  return { make, widthOf, number, percent, clock, ticks, logTicks, lower, nearest, interpolate, smoothed, rankColour };
})();
