"use strict";
// Small helpers: elements, numbers, and SVG charts. Text always goes in as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "circle", "text", "title"].includes(tag);
  const element = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") element.style.cssText = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const number = (value, digits = 0) =>
  value === null || value === undefined
    ? "–"
    : value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const percent = (value, digits = 1) => (value === null || value === undefined ? "–" : number(100 * value, digits) + " %");
const colour = (index) => `var(--arm-${index % 6})`;
const swatch = (index) => make("span", { class: "swatch", style: `background:${colour(index)}` });

function table(heads, rows) {
  const row = (tag, cells) => make("tr", {}, cells.map((cell) => make(tag, {}, cell)));
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": heads.filter((h) => typeof h === "string").join(", ") },
    make("table", {}, make("thead", {}, row("th", heads)), make("tbody", {}, rows.map((cells) => row("td", cells)))));
}

// A round step that gives about four ticks.
function step(span) {
  const raw = span / 4, power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 2.5, 5, 10].map((k) => k * power).find((k) => k >= raw) || power;
}

// series: [{name, colour, points: [[x, y], ...]}]; options: label, format, top, cursor, ticks, log.
function lineChart(series, options) {
  const width = 420, height = 210, left = 52, right = 18, up = 10, down = 28;
  const all = series.flatMap((one) => one.points);
  const scale = options.log ? Math.log10 : (v) => v;
  const xs = all.map((p) => scale(p[0]));
  const low = Math.min(...xs), high = Math.max(...xs, low + 1e-9);
  const floor = options.logY ? Math.floor(Math.log10(Math.min(...all.map((p) => p[1]).filter((v) => v > 0)))) : 0;
  const top = options.top || Math.max(...all.map((p) => p[1]), 1e-9) * 1.05;
  const x = (v) => left + ((scale(v) - low) / (high - low)) * (width - left - right);
  const rise = (v) => (options.logY ? (Math.log10(Math.max(v, 10 ** floor)) - floor) / (Math.log10(top) - floor) : Math.min(v, top) / top);
  const y = (v) => height - down - rise(v) * (height - up - down);
  const chart = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": options.label });
  const gap = step(top), levels = [];
  if (options.logY) for (let e = floor; 10 ** e <= top; e += 1) levels.push(10 ** e);
  else for (let v = 0; v <= top * 1.0001; v += gap) levels.push(v);
  for (const v of levels) {
    chart.append(make("line", { class: "axis", x1: left, x2: width - right, y1: y(v), y2: y(v) }),
      make("text", { x: left - 6, y: y(v) + 4, "text-anchor": "end" }, options.format(v)));
  }
  const ticks = options.ticks || [...new Set(all.map((p) => p[0]))];
  const every = Math.ceil(ticks.length / 9);
  ticks.filter((_, i) => i % every === 0).forEach((v) =>
    chart.append(make("text", { x: x(v), y: height - 9, "text-anchor": "middle" }, String(v))));
  if (options.cursor !== undefined) {
    chart.append(make("line", { class: "cursor", x1: x(options.cursor), x2: x(options.cursor), y1: up, y2: height - down }));
  }
  for (const one of series) {
    const path = one.points.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
    chart.append(make("path", { class: "line", d: path, style: `stroke:${one.colour};${one.dash ? "stroke-dasharray:5 4" : ""}` }));
    one.points.forEach((p) => chart.append(make("circle", { cx: x(p[0]), cy: y(p[1]), r: 2.6, style: `fill:${one.colour}` },
      make("title", {}, `${one.name}, ${p[0]}: ${options.format(p[1])}`))));
  }
  return make("figure", {}, make("figcaption", {}, make("b", {}, options.label)), chart);
}

// rows: [{name, colour, estimate, low, high}], shares of one.
function intervalChart(rows, label) {
  const width = 420, left = 150, right = 30, height = 26 + rows.length * 30;
  const x = (v) => left + v * (width - left - right);
  const chart = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const v of [0, 0.25, 0.5, 0.75, 1]) {
    chart.append(make("line", { class: "axis", x1: x(v), x2: x(v), y1: 4, y2: height - 20 }),
      make("text", { x: x(v), y: height - 6, "text-anchor": "middle" }, percent(v, 0)));
  }
  rows.forEach((row, index) => {
    const y = 18 + index * 30;
    chart.append(make("text", { x: left - 10, y: y + 4, "text-anchor": "end" }, row.name),
      make("line", { class: "whisker", x1: x(row.low), x2: x(row.high), y1: y, y2: y, style: `stroke:${row.colour}` }),
      make("circle", { cx: x(row.estimate), cy: y, r: 5, style: `fill:${row.colour}` },
        make("title", {}, `${row.name}: ${percent(row.estimate)} (${percent(row.low)} to ${percent(row.high)})`)));
  });
  return make("figure", {}, make("figcaption", {}, make("b", {}, label)), chart);
}

function legend(names) {
  return make("div", { class: "legend" }, names.map((name, i) => make("span", {}, swatch(i), make("b", {}, name))));
}
