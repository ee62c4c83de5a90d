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
document.addEventListener("keydown", event => {
  const way = {ArrowLeft: "prev", ArrowRight: "next"}[event.key], busy = event.target.closest("input, textarea, select, [tabindex]") || document.querySelector("#painter[open], .pswp");
  if (way && !busy && !event.altKey) document.querySelector(`a[rel=${way}]`)?.click();
});
// The tab Start: a folder that is chosen, files that are uploaded one by one, a search in the settings.
const choose = (input, value) => { input.value = value; input.dispatchEvent(new Event("change", {bubbles: true})); };
document.addEventListener("click", event => {
  const folder = event.target.dataset.chooses; if (!folder) return;
  choose(event.target.closest(".chooser").querySelector("input"), folder);
  event.target.closest(".folders").remove();
});
document.addEventListener("change", async event => {
  const {role} = event.target.dataset; if (!role) return;
  const place = event.target.closest(".upload"), bar = place.querySelector("progress"), folder = place.querySelector("[name=upload]").value, files = [...event.target.files], problems = [];
  bar.hidden = false;
  files.sort((one, other) => one.type.startsWith("image/") - other.type.startsWith("image/"));  // captions first
  for (const [index, file] of files.entries()) {
    const form = new FormData(), fields = {file, role, folder, prompt: document.getElementById("instruction").value};
    for (const name in fields) form.append(name, fields[name]);
    const answer = await fetch("/upload", {method: "POST", headers: {"hx-request": "true"}, body: form});
    if (!answer.ok) problems.push(await answer.text());
    bar.value = (index + 1) / files.length;
  }
  bar.hidden = true;
  message.innerHTML = problems.slice(0, 5).join("");
  choose(document.getElementById("root"), `uploads/${folder}`);
});
document.addEventListener("input", event => {
  if (event.target.id !== "search") return;
  const words = event.target.value.toLowerCase().split(" ");
  for (const part of document.querySelectorAll(".rest details")) {
    const fields = [...part.querySelectorAll(".field")];
    for (const field of fields) field.hidden = !words.every(word => field.textContent.toLowerCase().includes(word));
    part.open = words[0] !== "" && fields.some(field => !field.hidden);
  }
});
