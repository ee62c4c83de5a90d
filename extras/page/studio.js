// htmx puts new parts in place: what they show is drawn again, at the step that was chosen.
document.addEventListener("htmx:after:swap", () => {
  drawAll();
  for (const slider of document.querySelectorAll("input.step")) {
    if (!slider.touched) slider.value = slider.max;
    showStep(slider);
  }
  showEnds();
});
const showEnds = () => document.querySelectorAll(".log:not(:hover, :focus)").forEach(log => { log.scrollTop = log.scrollHeight; });
showEnds();
const message = document.getElementById("message");
document.addEventListener("htmx:error", () => { message.textContent = "The page has ended. Start python studio.py again, and open its address."; });
document.addEventListener("click", event => { if (!message.contains(event.target)) message.replaceChildren(); });
document.addEventListener("keydown", event => { if (event.key === "Enter" && event.ctrlKey && event.target.matches(".sample textarea")) event.target.form.requestSubmit(); });
document.addEventListener("click", event => {
  const shown = document.getElementById(event.target.dataset.copies);
  if (shown) { getSelection().selectAllChildren(shown); document.execCommand("copy"); event.target.textContent = "copied"; }
});
