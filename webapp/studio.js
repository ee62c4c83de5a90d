// htmx puts new parts in place: what they show is drawn again, at the step that was chosen.
document.addEventListener("htmx:after:swap", () => {
  drawAll();
  for (const slider of document.querySelectorAll("input.step")) {
    if (!slider.touched) slider.value = slider.max;
    showStep(slider);
  }
});
document.addEventListener("input", event => { if (event.target.matches("input.step")) event.target.touched = true; });
