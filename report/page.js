// Curves
const ink = name => getComputedStyle(document.body).getPropertyValue(`--${name}`);
const short = value => value == null ? "" : `${+value.toPrecision(4)}`;
const smoothed = (values, weight, sum = 0) =>  // as in TensorBoard
  values.map((value, at) => (sum = weight * sum + (1 - weight) * value) / (1 - weight ** (at + 1)));
const newPlot = (place, {title, lines}, data, log, whole) => {
  const axis = {stroke: () => ink("soft"), grid: {stroke: () => ink("line"), width: 1}, ticks: {show: false}, size: 30};
  const range = (_, low, high) => {
    const [least, most] = place.range, part = !whole.checked && low < most && high > least;
    return uPlot.rangeNum(part ? Math.max(low, least) : low, part ? Math.min(high, most) : high, 0.1, true);
  };
  return new uPlot({
    title, width: place.clientWidth, height: 220,
    series: [{label: "step"}, ...lines.map(line => ({...line, stroke: ink(line.color), width: 2, value: (_, value) => short(value)}))],
    axes: [axis, {...axis, size: 64, values: (_, values) => values.map(short)}],
    scales: {x: {time: false}, y: log.checked ? {distr: 3} : {range}},
  }, data, place);
};
const drawAll = () => document.querySelectorAll("[data-chart]").forEach(place => {
  const [weight, log, whole] = place.closest(".plots").querySelectorAll("input"), {plot} = place, state = [log.checked, ink("a"), place.clientWidth];
  if (place.drawn === (place.drawn = `${[place.dataset.chart, weight.value, whole.checked, state]}`)) return;
  const chart = JSON.parse(place.dataset.chart), {min, max} = plot?.scales.x ?? {}, zoomed = min > plot?.data[0][0] || max < plot?.data[0].at(-1);
  const data = uPlot.join(chart.lines.map(line => [line.x, line.alpha < 1 || line.dash[0] ? line.y : smoothed(line.y, weight.value)]));
  place.range = chart.range;
  if (place.look !== (place.look = `${[state, chart.title, ...chart.lines.map(line => line.label)]}`)) {
    plot?.destroy();
    place.plot = newPlot(place, chart, data, log, whole);
  }
  place.plot.batch(() => { place.plot.setData(data); if (zoomed) place.plot.setScale("x", {min, max}); });
});
addEventListener("resize", drawAll);

// Images: of a step, and in large with a wipe
const showStep = slider => {
  slider.parentNode.querySelector("output").value = JSON.parse(slider.dataset.steps)[slider.value];
  for (const image of slider.closest(".samples").querySelectorAll(".result")) {
    const [src, name] = JSON.parse(image.dataset.results)[slider.value] ?? [];
    if (src) [image.src, image.alt, image.closest("figure").querySelector("figcaption").textContent] = [src, name, name];
  }
};
const enlarge = opener => {
  const openers = [...document.querySelectorAll(".full")], dataSource = openers.map(one => {
    const [image, over] = (one.closest("figure") ?? one).querySelectorAll("img"), prompt = one.closest(".row")?.querySelector("p")?.textContent;
    const height = 2048 * image.naturalHeight / image.naturalWidth || 2048;
    return {look: image.className, over: over?.src, src: one.href ?? image.src, words: [image.alt, prompt].filter(Boolean).join(": "), type: "wipe", width: 2048, height};
  });
  const box = new PhotoSwipe({dataSource, index: openers.indexOf(opener), showHideAnimationType: "none", wheelToZoom: true, bgOpacity: 1});
  let chosen;
  const show = () => {
    const {content: {element}, data} = box.currSlide, over = chosen ?? data.over, [wipe, words] = box.element.querySelector(".pswp__words").children;
    element.classList.toggle("wipe", !!over);
    element.lastChild.src = over ?? data.src;
    wipe.hidden = !over;
    words.textContent = data.words;
  };
  box.addFilter("isContentZoomable", () => true);
  box.on("contentLoad", event => {
    const {content, content: {data}} = event;
    event.preventDefault();
    content.element = Object.assign(document.createElement("div"), {className: `${data.look} pswp__img`, innerHTML: '<img class="pswp__img"><img class="over pswp__img" alt="">'});
    Object.assign(content.element.firstChild, {src: data.src, alt: data.words});
  });
  box.on("uiRegister", () => {
    box.ui.registerElement({name: "compare", isButton: true, html: "compare", title: "Compare the others with this image", onClick: () => { chosen = box.currSlide.data.src; show(); }});
    box.ui.registerElement({name: "words", appendTo: "root", html: '<input type="range" min="0" max="100" value="50" aria-label="compare"><p></p>'});
  });
  box.on("keydown", event => { if (event.originalEvent.target.matches("input") && event.originalEvent.key !== "Escape") event.preventDefault(); });
  box.on("change", show);
  box.init();
};
document.addEventListener("click", event => {
  const opener = event.target.closest(".full");
  if (opener) { event.preventDefault(); enlarge(opener); }
});
document.addEventListener("input", ({target}) => {
  if (target.matches("input.step")) { target.touched = true; showStep(target); }
  if (target.closest(".tools")) drawAll();
  target.closest(".wipe, .pswp")?.style.setProperty("--at", `${target.value}%`);
});
drawAll();
