let touched = false;  // a page that reloads itself waits while it is in use

const svg = (name, attributes, parent, text) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  return parent.appendChild(node);
};
const short = (value, range) => {  // as many decimals as tell values of this range apart
  const decimals = Math.max(0, 2 - Math.floor(Math.log10(range)));
  return decimals > 8 || Math.abs(value) >= 1e6 ? value.toExponential(2) : value.toFixed(decimals);
};
const draw = (chart, place, id) => {
  let [y0, y1] = chart.range;
  if (y0 === y1) { y0 -= Math.abs(y0) / 2 || 0.5; y1 += Math.abs(y1) / 2 || 0.5; }
  const ticks = [0, 0.5, 1].map(part => y0 + part * (y1 - y0)), names = ticks.map(y => short(y, y1 - y0));
  const W = 460, H = 220, left = 14 + 6.5 * Math.max(...names.map(name => name.length)), right = 12, top = chart.note || chart.title ? 42 : 26, bottom = 24;
  const box = svg("svg", {viewBox: `0 0 ${W} ${H}`}, place);
  const xs = chart.lines.flatMap(line => line.points).map(p => p[0]);
  let x0 = Math.min(...xs), x1 = Math.max(...xs);
  if (x0 === x1) x1 = x0 + 1;
  const X = x => left + (x - x0) / (x1 - x0) * (W - left - right), Y = y => top + (y1 - y) / (y1 - y0) * (H - top - bottom);
  const clip = svg("clipPath", {id}, box);
  svg("rect", {x: left - 3, y: top - 3, width: W - left - right + 6, height: H - top - bottom + 6}, clip);
  const note = [chart.title, chart.note].filter(Boolean).join(", ");
  if (note) svg("text", {x: W - right, y: 32, "text-anchor": "end"}, box, note);
  ticks.forEach((y, at) => {
    const part = at / 2;
    svg("line", {x1: left, x2: W - right, y1: Y(y), y2: Y(y), stroke: "var(--line)"}, box);
    svg("text", {x: left - 6, y: Y(y) + 4, "text-anchor": "end"}, box, names[at]);
    const x = Math.round(x0 + part * (x1 - x0));
    if (part !== 0.5 || (x > x0 && x < x1)) svg("text", {x: X(x), y: H - 8, "text-anchor": part === 0 ? "start" : part === 1 ? "end" : "middle"}, box, x);
  });
  let at = left;
  for (const line of chart.lines) {
    const known = line.points, ink = `var(--${line.color})`;
    svg("polyline", {"clip-path": `url(#${id})`, points: known.map(p => `${X(p[0])},${Y(p[1])}`).join(" "), fill: "none", stroke: ink, "stroke-width": line.faint ? 1 : 2, "stroke-opacity": line.faint ? 0.4 : 1, "stroke-dasharray": line.dashed ? "5 4" : "none"}, box);
    if (!line.dashed && known.length < 40) for (const p of known) svg("circle", {cx: X(p[0]), cy: Y(p[1]), r: 2.5, fill: ink, "clip-path": `url(#${id})`}, box);
    const label = svg("text", {x: at, y: 16, fill: ink}, box, line.name);
    label.style.fill = ink;
    if (line.name) at += label.getComputedTextLength() + 14;
  }
};
const showStep = slider => {
  const step = JSON.parse(slider.dataset.steps)[slider.value], part = slider.closest(".samples");
  slider.parentNode.querySelector("output").value = step;
  for (const image of part.querySelectorAll("img.result")) image.src = JSON.parse(image.dataset.results)[slider.value] || image.src;
  for (const caption of part.querySelectorAll("figcaption.result")) caption.textContent = step ? `after step ${step}` : "before";
};
const drawAll = () => document.querySelectorAll(".curves").forEach((place, number) => {
  if (place.drawn === place.dataset.charts) return;
  place.drawn = place.dataset.charts;
  place.replaceChildren();
  JSON.parse(place.drawn).forEach((chart, at) => draw(chart, place, `inside${number}-${at}`));
});
document.addEventListener("input", event => {
  if (event.target.matches("input.step")) { touched = true; showStep(event.target); }
  if (event.target.matches(".wipe input")) { touched = true; event.target.parentNode.style.setProperty("--at", `${event.target.value}%`); }
});
drawAll();
