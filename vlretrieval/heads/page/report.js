"use strict";
// The page's own data: models with layers, and examples with every head's map. Nothing is fetched.
const data = JSON.parse(document.getElementById("data").textContent);
const chosen = { example: 0, word: 0, patch: null, head: null };
const pictures = data.examples.map((example) => {
  const image = new Image();
  image.onload = () => draw();
  image.src = example.picture;
  return image;
});

const decoded = new Map();
function values(entry) { // shares of the weight, row by row: bytes times the largest of the row
  if (!decoded.has(entry)) {
    const bytes = Uint8Array.from(atob(entry.data), (letter) => letter.charCodeAt(0));
    const [heads, rows, columns] = entry.shape;
    const found = new Float32Array(bytes.length);
    for (let row = 0; row < heads * rows; row++)
      for (let at = row * columns; at < (row + 1) * columns; at++) found[at] = bytes[at] / 255 * entry.largest[row];
    decoded.set(entry, found);
  }
  return decoded.get(entry);
}

function entryOf(model, layer) { return data.examples[chosen.example].maps[model][layer]; }

// What one head does with the word (or patch) that was chosen: {patches: [...]} or {words: [...], asked: number}.
function seenBy(model, layer, head) {
  const entry = entryOf(model, layer);
  if (!entry) return null;
  const all = values(entry), [, rows, columns] = entry.shape, start = head * rows * columns;
  const row = (number) => all.slice(start + number * columns, start + (number + 1) * columns);
  const mean = () => {
    const total = new Float32Array(columns);
    for (let r = 0; r < rows; r++) row(r).forEach((value, at) => { total[at] += value / rows; });
    return total;
  };
  if (entry.rows === "words" || entry.rows === "caption") {
    const found = entry.rows === "caption" ? row(0) : row(chosen.word);
    const who = entry.rows === "caption" ? "the whole caption looks" : "the word looks";
    return entry.columns === "patches" ? { patches: found, who } : { words: found, asked: entry.rows === "caption" ? 0 : chosen.word, who };
  }
  if (entry.columns === "words") { // patches ask words
    if (chosen.patch !== null && rows > 1) return { words: row(chosen.patch), who: "the patch looks" };
    const column = new Float32Array(rows);
    for (let r = 0; r < rows; r++) column[r] = all[start + r * columns + chosen.word];
    return { patches: column, who: "these patches look at the word" };
  }
  if (entry.rows === "class") return { patches: row(0), who: "the class token looks" };
  return chosen.patch === null ? { patches: mean(), who: "all patches look" } : { patches: row(chosen.patch), who: "the patch looks" };
}

function overlay(canvas, patches, side) {
  const image = pictures[chosen.example], pen = canvas.getContext("2d"), size = canvas.width;
  pen.clearRect(0, 0, size, size);
  if (image.complete && image.naturalWidth) pen.drawImage(image, 0, 0, size, size);
  if (!patches) return;
  const most = Math.max(...patches, 1e-9), step = size / side;
  for (let at = 0; at < side * side; at++) {
    pen.fillStyle = `rgba(12, 14, 18, ${0.86 * (1 - patches[at] / most)})`;
    const x = Math.round(at % side * step), y = Math.round(Math.floor(at / side) * step);
    pen.fillRect(x, y, Math.round((at % side + 1) * step) - x, Math.round((Math.floor(at / side) + 1) * step) - y);
  }
}

function outline(canvas, boxes, colour) {
  const pen = canvas.getContext("2d"), size = canvas.width;
  pen.lineWidth = Math.max(2, size / 70);
  for (const [x0, y0, x1, y1] of boxes) {
    pen.strokeStyle = colour;
    pen.strokeRect(x0 * size, y0 * size, (x1 - x0) * size, (y1 - y0) * size);
  }
}

function namedBoxes() { // of the thing that the chosen word names
  const example = data.examples[chosen.example];
  return example.named.filter(([words]) => words.includes(chosen.word)).flatMap(([, boxes]) => boxes);
}

function strip(words) {
  const holder = document.createElement("div");
  holder.className = "strip";
  const most = Math.max(...words.words, 1e-9);
  data.examples[chosen.example].words.forEach((word, at) => {
    const piece = document.createElement("span");
    const share = words.words[at] / most;
    piece.textContent = word;
    piece.title = (100 * words.words[at]).toFixed(1) + " %";
    piece.style.backgroundColor = `rgba(var(--heat), ${0.6 * share})`;
    if (at === words.asked) piece.className = "asked";
    holder.append(piece);
  });
  return holder;
}

function picture(model, layer, head, size) {
  const seen = seenBy(model, layer, head), figure = document.createElement("figure");
  if (!seen) return figure;
  const where = data.models[model].layers[layer];
  if (seen.patches) {
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = size;
    overlay(canvas, seen.patches, data.examples[chosen.example].side);
    outline(canvas, namedBoxes(), "#ffd54a");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${where.title}, head ${head + 1}: where ${seen.who}`);
    figure.append(canvas);
  } else {
    figure.className = "wide";
    figure.append(strip(seen));
  }
  const caption = document.createElement("figcaption");
  caption.textContent = `head ${head + 1}, ${where.roles[head]}`;
  figure.append(caption);
  return figure;
}

function drawLook() {
  const example = data.examples[chosen.example], main = document.getElementById("photo");
  overlay(main, null, example.side);
  outline(main, namedBoxes(), "#ffd54a");
  if (chosen.patch !== null) {
    const x = chosen.patch % example.side / example.side, y = Math.floor(chosen.patch / example.side) / example.side;
    outline(main, [[x, y, x + 1 / example.side, y + 1 / example.side]], "#ff6e6e");
  }
  document.getElementById("identity").textContent = example.id;
  document.querySelectorAll("#words button").forEach((button, at) => button.setAttribute("aria-pressed", String(at === chosen.word)));
  document.querySelectorAll("[data-maps]").forEach((holder) => {
    const [model, layer] = JSON.parse(holder.dataset.maps);
    const heads = data.models[model].layers[layer].roles.length, seen = seenBy(model, layer, 0);
    holder.replaceChildren(...Array.from({ length: heads }, (_, head) => picture(model, layer, head, 132)));
    const note = holder.previousElementSibling.querySelector("[data-who]");
    if (note) note.textContent = seen ? `where ${seen.who}`.replace("where these", "these") : "not shown";
  });
}

function drawSide() {
  const side = document.getElementById("preview");
  if (!side || !chosen.head) return;
  const [model, layer, head] = chosen.head, where = data.models[model].layers[layer];
  const seen = data.examples.length ? seenBy(model, layer, head) : null;
  const title = document.createElement("h3");
  title.textContent = `${where.title}, head ${head + 1}`;
  const parts = [title];
  if (seen) {
    const shown = picture(model, layer, head, 240);
    shown.className = "";
    shown.style.margin = "0";
    shown.querySelector("figcaption").textContent =
      `${where.roles[head]}: where ${seen.who}`.replace("where these", "these") + ` (word: ${data.examples[chosen.example].words[chosen.word]})`;
    parts.push(shown);
  }
  side.replaceChildren(...parts);
}

function draw() { if (data.examples.length) drawLook(); drawSide(); }

function chooseExample(number) {
  chosen.example = number;
  chosen.word = data.examples[number].word;
  chosen.patch = null;
  document.querySelectorAll("#examples button").forEach((button, at) => button.setAttribute("aria-pressed", String(at === number)));
  const words = data.examples[number].words.map((word, at) => {
    const button = document.createElement("button");
    button.textContent = word;
    button.addEventListener("click", () => { chosen.word = at; chosen.patch = null; draw(); });
    return button;
  });
  document.getElementById("words").replaceChildren(...words);
  draw();
}

function setUpLook() {
  document.querySelectorAll("#examples button").forEach((button, at) => button.addEventListener("click", () => chooseExample(at)));
  const photo = document.getElementById("photo");
  photo.addEventListener("click", (event) => {
    const side = data.examples[chosen.example].side, box = photo.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / box.width * side), row = Math.floor((event.clientY - box.top) / box.height * side);
    const patch = Math.min(side - 1, Math.max(0, row)) * side + Math.min(side - 1, Math.max(0, column));
    chosen.patch = chosen.patch === patch ? null : patch;
    draw();
  });
  photo.addEventListener("keydown", (event) => {
    const side = data.examples[chosen.example].side, move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -side, ArrowDown: side }[event.key];
    if (event.key === "Escape") chosen.patch = null;
    else if (move) {
      const next = (chosen.patch === null ? 0 : chosen.patch + move);
      if (next >= 0 && next < side * side) chosen.patch = next;
    } else return;
    event.preventDefault();
    draw();
  });
  chooseExample(0);
}

function setUpTable() {
  const body = document.querySelector("#table tbody");
  const show = (row) => {
    document.querySelectorAll("#table tr.chosen").forEach((other) => other.classList.remove("chosen"));
    row.classList.add("chosen");
    chosen.head = JSON.parse(row.dataset.head);
    drawSide();
  };
  for (const row of body.rows) for (const event of ["mouseenter", "focus", "click"]) row.addEventListener(event, () => show(row));
  body.addEventListener("keydown", (event) => {
    const move = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    const row = event.target.closest("tr");
    if (move && row && row[move]) { row[move].focus(); event.preventDefault(); }
  });
  document.querySelectorAll("#table thead button").forEach((button) => button.addEventListener("click", () => {
    const cell = button.closest("th"), column = cell.cellIndex;
    const down = cell.getAttribute("aria-sort") !== "descending";
    document.querySelectorAll("#table thead th").forEach((other) => other.removeAttribute("aria-sort"));
    cell.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => { const text = row.cells[column].dataset.value; return text === undefined ? row.cells[column].textContent : text === "" ? null : Number(text); };
    const rows = [...body.rows].sort((a, b) => {
      const [first, second] = [key(a), key(b)];
      if (first === null || second === null) return (first === null) - (second === null); // unmeasured ones last
      const order = typeof first === "number" ? first - second : first.localeCompare(second, undefined, { numeric: true });
      return down ? -order : order;
    });
    body.append(...rows);
  }));
  show(body.rows[0]);
}

if (data.examples.length) setUpLook();
setUpTable();
