// Paints a mask over a target: white counts. Strokes are kept, so that each can be undone.
for (const canvas of document.querySelectorAll(".paint canvas")) {
  const form = canvas.closest("form"), target = canvas.previousElementSibling, pen = canvas.getContext("2d"), older = new Image(), strokes = [];
  const draw = ({ink, width, points}) => {
    pen.fillStyle = pen.strokeStyle = ink;
    if (!points) return pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.lineWidth = width;
    pen.lineCap = pen.lineJoin = "round";
    pen.beginPath();
    for (const [x, y] of points) pen.lineTo(x, y);
    pen.lineTo(points.at(-1)[0] + 0.01, points.at(-1)[1]);  // a point alone would not be drawn
    pen.stroke();
  };
  const drawAll = () => {
    draw({ink: "#000"});
    if (older.width) pen.drawImage(older, 0, 0, canvas.width, canvas.height);
    strokes.forEach(draw);
  };
  const place = event => {
    const box = canvas.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width * canvas.width, (event.clientY - box.top) / box.height * canvas.height];
  };
  target.decode().then(() => {
    [canvas.width, canvas.height] = [target.naturalWidth, target.naturalHeight];
    drawAll();
    if (canvas.dataset.mask) older.src = canvas.dataset.mask;
  });
  older.onload = drawAll;
  canvas.addEventListener("pointerdown", event => {
    if (!event.isPrimary || event.button) return;
    canvas.setPointerCapture(event.pointerId);
    strokes.push({ink: form.tool.value, width: form.size.value / 100 * canvas.width, points: [place(event)]});
    draw(strokes.at(-1));
  });
  canvas.addEventListener("pointermove", event => {
    if (!event.isPrimary || !canvas.hasPointerCapture(event.pointerId)) return;
    strokes.at(-1).points.push(place(event));
    draw(strokes.at(-1));
  });
  form.undo.addEventListener("click", () => { strokes.pop(); drawAll(); });
  form.clear.addEventListener("click", () => { strokes.push({ink: "#000"}); drawAll(); });
  form.save.addEventListener("click", () => canvas.toBlob(blob => {
    const files = new DataTransfer();
    files.items.add(new File([blob], "mask.png"));
    form.mask.files = files.files;
    form.requestSubmit();
  }));
}
