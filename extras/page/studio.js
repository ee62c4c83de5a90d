// htmx puts new parts in place: what they show is drawn again, at the step that was chosen.
document.addEventListener("htmx:after:swap", () => {
  drawAll();
  for (const slider of document.querySelectorAll("input.step")) {
    if (!slider.touched) slider.value = slider.max;
    showStep(slider);
  }
  showPicked();
  showEnds();
});
const showEnds = () => document.querySelectorAll(".log:not(:hover, :focus)").forEach(log => { log.scrollTop = log.scrollHeight; });
showEnds();
const message = document.getElementById("message");
document.addEventListener("htmx:error", () => { message.textContent = "The page has ended. Start python studio.py again, and open its address."; });
document.addEventListener("click", event => { if (!message.contains(event.target)) message.replaceChildren(); });
document.addEventListener("input", event => { if (event.target.matches("input.step")) event.target.touched = true; });
let picked = [];  // the last two results that were chosen, compared by a wipe
const showPicked = () => document.querySelectorAll(".pick").forEach(one => { one.ariaPressed = picked.includes(one.firstElementChild.src); });
document.addEventListener("submit", event => {
  if (event.target.matches(".try")) { picked = []; document.querySelector("#wipe").hidden = true; }
});
document.addEventListener("click", event => {
  const pick = event.target.closest(".pick"), wipe = document.querySelector("#wipe"); if (!pick) return;
  picked = [...picked, pick.firstElementChild.src].slice(-2);
  showPicked();
  wipe.hidden = picked.length < 2;
  wipe.querySelectorAll("img").forEach((image, index) => { image.src = picked.at(-index); });
});
document.addEventListener("keydown", event => { if (event.key === "Enter" && event.ctrlKey && event.target.matches(".sample textarea")) event.target.form.requestSubmit(); });
document.addEventListener("click", event => {
  const shown = document.getElementById(event.target.dataset.copies);
  if (shown) { getSelection().selectAllChildren(shown); document.execCommand("copy"); event.target.textContent = "copied"; }
});
document.addEventListener("keydown", event => {
  const way = {ArrowLeft: "prev", ArrowRight: "next"}[event.key], busy = event.target.closest("input, textarea, select, [tabindex]") || document.querySelector("#painter[open], .pswp");
  if (way && !busy && !event.altKey) document.querySelector(`a[rel=${way}]`)?.click();
});
