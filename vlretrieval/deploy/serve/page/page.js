// Search box, grid of results, and which patches each word's heads look at. No library, no request but to this server.
"use strict";

const byId = (id) => document.getElementById(id);
const state = { hits: [], query: null, matches: false, running: null, maps: null, word: -1, head: 0 };

// ---- talking to the server ----

function headers() {
  const token = sessionStorage.getItem("token");
  return token ? { Authorization: `Bearer ${token}` } : {};
}

async function ask(path, options = {}) {
  let answer = await fetch(path, { ...options, headers: headers() });
  if (answer.status === 401) {
    const token = window.prompt("This server asks for a token:");
    if (token) {
      sessionStorage.setItem("token", token);
      answer = await fetch(path, { ...options, headers: headers() });
    }
  }
  if (!answer.ok) {
    let detail = `status ${answer.status}`;
    try {
      const said = (await answer.json()).detail;
      detail = typeof said === "string" ? said : said.map((one) => `${one.loc.at(-1)}: ${one.msg}`).join("; ");
    } catch { /* the status says enough */ }
    throw new Error(detail);
  }
  return answer;
}

const pathOf = (id) => id.split("/").map(encodeURIComponent).join("/");

// Pictures are fetched and not linked, so that the token goes with them; a busy server is asked again.
async function showPicture(image, id, side, signal) {
  for (let attempt = 0; ; attempt++) {
    try {
      const blob = await (await ask(`/pictures/${pathOf(id)}?side=${side}`, { signal })).blob();
      const url = URL.createObjectURL(blob);
      image.onload = () => URL.revokeObjectURL(url);
      image.src = url;
      await image.decode();
      return;
    } catch (error) {
      if (signal?.aborted) return;
      if (attempt === 4) throw error;
      await new Promise((done) => setTimeout(done, 200 * 2 ** attempt));
    }
  }
}

function tell(text, isError = false) {
  byId("status").textContent = text;
  byId("status").classList.toggle("error", isError);
}

// ---- searching ----

async function search(path, options, query) {
  state.running?.abort();
  const running = (state.running = new AbortController());
  tell("Searching ...");
  try {
    const found = await (await ask(path, { ...options, signal: running.signal })).json();
    state.hits = found.hits;
    state.query = query;
    const times = Object.entries(found.milliseconds).map(([stage, ms]) => `${stage} ${ms.toFixed(1)}`).join(", ");
    const matched = found.hits.some((hit) => hit.match !== null);
    byId("order").hidden = !matched;
    tell(`${found.hits.length} of ${found.size.toLocaleString("en")}` +
      (matched ? ", re-ranked by the cross-modal heads" : ", by cosine") + ` (ms: ${times})`);
    draw(running.signal);
  } catch (error) {
    if (!running.signal.aborted) tell(error.message, true);
  }
}

byId("search").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("text").value.trim();
  if (!text) return;
  const query = new URLSearchParams({ text, top: byId("top").value, top_k: byId("top_k").value });
  search(`/search?${query}`, {}, text);
});

byId("file").addEventListener("change", () => {
  const file = byId("file").files[0];
  if (file) search(`/search?top=${byId("top").value}`, { method: "POST", body: file }, null);
  byId("file").value = "";
});

byId("order").addEventListener("change", () => draw(state.running?.signal));

// ---- results ----

function draw(signal) {
  const before = document.querySelector("[name=order]:checked").value === "before";
  const hits = before ? [...state.hits].sort((a, b) => a.place - b.place) : state.hits;
  byId("results").replaceChildren(...hits.map((hit, at) => card(hit, at + 1, before, signal)));
}

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function card(hit, rank, before, signal) {
  const made = element("button", undefined, "card");
  made.type = "button";
  made.dataset.id = hit.id;
  const image = element("img");
  image.alt = `result ${rank}: ${hit.id}`;
  const said = element("span", undefined, "said");
  said.append(element("span", `${before ? hit.place : rank} `, "rank"));
  if (hit.match !== null && !before) {
    const rose = hit.place - rank;
    const moved = rose > 0 ? `↑ from ${hit.place}` : rose < 0 ? `↓ from ${hit.place}` : "as by cosine";
    said.append(element("span", moved, rose > 0 ? "up" : rose < 0 ? "down" : ""));
  }
  said.append(element("br"), `cosine ${hit.cosine.toFixed(3)}`);
  if (hit.match !== null) said.append(`, match ${hit.match.toFixed(2)}`, element("br"), `score ${hit.score.toFixed(2)}`);
  said.append(element("br"), hit.id);
  made.append(image, said);
  made.addEventListener("click", () => open(hit));
  showPicture(image, hit.id, 256, signal).catch((error) => image.replaceWith(element("span", error.message, "none")));
  return made;
}

// ---- attention ----

async function open(hit) {
  state.maps = null;
  byId("view-title").textContent = hit.id;
  byId("explain").textContent = "";
  byId("words").replaceChildren();
  byId("heads").replaceChildren();
  byId("pair").textContent = `cosine ${hit.cosine.toFixed(4)}` +
    (hit.match === null ? "" : `, match ${hit.match.toFixed(4)}, place by cosine ${hit.place}`);
  byId("heat").hidden = true;
  byId("large").removeAttribute("src");
  byId("large").alt = hit.id;
  byId("view").showModal();
  const opened = (state.opened = Symbol(hit.id));
  showPicture(byId("large"), hit.id, 1024).then(paint).catch((error) => { byId("explain").textContent = error.message; });
  if (state.query === null || !state.matches) {
    byId("explain").textContent = state.matches
      ? "A text is needed to see what its words look at." : "This model has no cross-modal heads to look into.";
    return;
  }
  try {
    const query = new URLSearchParams({ id: hit.id, text: state.query });
    const maps = await (await ask(`/attention?${query}`)).json();
    if (state.opened !== opened) return;
    state.maps = maps;
    state.word = -1;
    state.head = 0;
    controls();
    paint();
  } catch (error) {
    byId("explain").textContent = error.message;
  }
}

function choice(text, pressed, choose) {
  const made = element("button", text);
  made.type = "button";
  made.setAttribute("aria-pressed", String(pressed));
  made.addEventListener("click", () => {
    choose();
    const place = [...made.parentElement.querySelectorAll("button")].indexOf(made), group = made.parentElement.id;
    controls();
    byId(group).querySelectorAll("button")[place].focus();
    paint();
  });
  return made;
}

function controls() {
  const maps = state.maps, chosen = maps.heads[state.head];
  byId("words").replaceChildren(
    choice("whole text", state.word < 0, () => { state.word = -1; }),
    ...maps.words.map((word, at) => choice(word, state.word === at, () => { state.word = at; })));
  const shown = [];
  maps.heads.forEach((head, at) => {
    const kind = `${head.kind}, layer ${head.layer}`;
    const before = maps.heads[at - 1];
    if (!before || before.kind !== head.kind || before.layer !== head.layer) shown.push(element("h3", kind));
    shown.push(choice(`head ${head.head}`, state.head === at, () => { state.head = at; }));
  });
  byId("heads").replaceChildren(...shown);
  const word = state.word < 0 || !chosen.words ? "the whole text" : `“${maps.words[state.word]}”`;
  const note = chosen.words || state.word < 0 ? "" : " (this layer speaks for the whole text alone)";
  byId("explain").textContent = chosen.kind === "text to image"
    ? `Bright: patches that ${word} looks at${note}.` : `Bright: patches that look at ${word}.`;
}

// The square that the model saw, in the picture as it is shown: all of it, its middle, or with a margin.
function seen(width, height, resize) {
  const side = resize === "crop" ? Math.min(width, height) : Math.max(width, height);
  return resize === "squash" ? [0, 0, width, height] : [(width - side) / 2, (height - side) / 2, side, side];
}

function paint() {
  const image = byId("large"), heat = byId("heat"), maps = state.maps;
  if (!maps || !image.naturalWidth) return;
  const head = maps.heads[state.head], side = maps.side;
  const weights = state.word < 0 || !head.words ? head.whole : head.words[state.word];
  const low = Math.min(...weights), high = Math.max(...weights);
  const small = document.createElement("canvas");
  small.width = small.height = side;
  const pixels = small.getContext("2d").createImageData(side, side);
  weights.forEach((weight, at) => {  // dark where the head does not look
    pixels.data[4 * at + 3] = 225 * (1 - (high > low ? (weight - low) / (high - low) : 1));
  });
  small.getContext("2d").putImageData(pixels, 0, 0);
  const width = image.clientWidth, height = image.clientHeight;
  heat.width = width;
  heat.height = height;
  heat.style.width = `${width}px`;
  heat.style.height = `${height}px`;
  const canvas = heat.getContext("2d");
  const [x, y, w, h] = seen(width, height, maps.resize);
  if (maps.resize === "crop") {  // what was cut off, no head could see
    canvas.fillStyle = "rgb(0 0 0 / 225)";
    canvas.fillRect(0, 0, width, height);
    canvas.clearRect(x, y, w, h);
  }
  canvas.imageSmoothingEnabled = false;
  canvas.drawImage(small, x, y, w, h);
  heat.hidden = false;
  heat.dataset.painted = `${state.head}/${state.word}`;
}

byId("close").addEventListener("click", () => byId("view").close());
byId("view").addEventListener("click", (event) => { if (event.target === byId("view")) byId("view").close(); });
window.addEventListener("resize", paint);

(async () => {
  try {
    const health = await (await ask("/healthz")).json();
    state.matches = health.matches;
    byId("size").textContent = health.pictures.toLocaleString("en");
    if (!health.complete) tell("The index is not finished; some pictures are not in it yet.");
  } catch (error) {
    tell(error.message, true);
  }
  byId("text").focus();
})();
