// Curves: hover shows values, a drag zooms, a double click ends the zoom.
const ink = name => getComputedStyle(document.body).getPropertyValue(`--${name}`);
const short = value => value == null ? "" : `${+value.toPrecision(4)}`;
const smoothed = (values, weight) => {  // as in TensorBoard
  let sum = 0;
  return values.map((value, at) => (sum = weight * sum + (1 - weight) * value) / (1 - weight ** (at + 1)));
};
const newPlot = (card, {title, lines}, data, log, whole) => {
  const axis = {stroke: () => ink("soft"), grid: {stroke: () => ink("line"), width: 1}, ticks: {show: false}};
  const range = (_, low, high) => {
    const [least, most] = card.range, part = !whole.checked && low < most && high > least;
    return uPlot.rangeNum(part ? Math.max(low, least) : low, part ? Math.min(high, most) : high, 0.1, true);
  };
  const series = lines.map(({name, color, faint, dashed}) => ({label: name, stroke: ink(color), width: 2, alpha: faint ? 0.3 : 1, dash: dashed ? [5, 4] : [], value: (_, value) => short(value)}));
  return new uPlot({
    title, width: card.clientWidth, height: 240, series: [{label: "step"}, ...series],
    axes: [axis, {...axis, size: 64, values: (_, values) => values.map(short)}],
    scales: {x: {time: false}, y: log.checked ? {distr: 3} : {range}},
  }, data, card.querySelector("div"));
};
const resized = new ResizeObserver(cards => { for (const {target} of cards) target.plot.setSize({width: target.clientWidth, height: 240}); });
const drawAll = () => document.querySelectorAll(".chart").forEach(card => {
  const [weight, log, whole] = card.parentNode.querySelectorAll("input"), {plot} = card, state = [log.checked, ink("a")];
  if (card.drawn === (card.drawn = `${[card.dataset.chart, weight.value, whole.checked, state]}`)) return;
  const chart = JSON.parse(card.dataset.chart), {min, max} = plot?.scales.x ?? {}, zoomed = min > plot?.data[0][0] || max < plot?.data[0].at(-1);
  const data = uPlot.join(chart.lines.map(line => [line.steps, line.faint || line.dashed ? line.values : smoothed(line.values, weight.value)]));
  card.range = chart.range;
  if (card.look !== (card.look = `${[state, chart.title, ...chart.lines.map(line => line.name)]}`)) {
    plot?.destroy();
    card.plot = newPlot(card, chart, data, log, whole);
    resized.observe(card);
  }
  card.plot.batch(() => { card.plot.setData(data); if (zoomed) card.plot.setScale("x", {min, max}); });
});

// Images: those of the slider's step; any of them in large, under a wipe over the one before training or a chosen one.
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
    return {image, over: over?.src, src: one.href ?? image.src, words: [image.alt, prompt].filter(Boolean).join(": "), type: "wipe", width: 2048, height};
  });
  const box = new PhotoSwipe({dataSource, index: openers.indexOf(opener), showHideAnimationType: "none", wheelToZoom: true, bgOpacity: 1});
  let chosen;
  const show = () => {
    const {content: {element}, data} = box.currSlide, over = chosen ?? data.over, [wipe, words] = box.element.querySelector(".pswp__words").children;
    element.classList.toggle("wipe", over);
    element.lastChild.src = over ?? data.src;
    wipe.hidden = !over;
    words.textContent = data.words;
  };
  box.addFilter("isContentZoomable", () => true);
  box.on("contentLoad", event => {
    const {content, content: {data}} = event, image = data.image.cloneNode();
    event.preventDefault();
    image.src = data.src;
    image.className += " pswp__img";
    content.element = document.createElement("div");
    content.element.className = "pswp__img";
    content.element.append(image, image.cloneNode());
    content.element.lastChild.className += " over";
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
  if (target.matches("input.step")) showStep(target);
  if (target.closest(".tools")) drawAll();
  target.closest(".wipe, .pswp")?.style.setProperty("--at", `${target.value}%`);
});
drawAll();
