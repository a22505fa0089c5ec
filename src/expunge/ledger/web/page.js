"use strict";

// Everything that comes from the ledger goes to the page as text, never as markup.
const find = (id) => document.getElementById(id);
let token = sessionStorage.getItem("token") || "";
let chosen = "";
let shown = "";

const given = new URLSearchParams(location.hash.slice(1));
if (given.has("token")) {
  token = given.get("token");
  sessionStorage.setItem("token", token);
  history.replaceState(null, "", location.pathname);
}

async function ask(path, body) {
  const options = { headers: { Authorization: `Bearer ${token}` } };
  if (body !== undefined) {
    options.method = "POST";
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  const answer = await fetch(`/api/${path}`, options);
  if (answer.status === 401) {
    door();
    throw new Error("Give the token that `expunge serve` has printed.");
  }
  if (!answer.ok) {
    const said = await answer.json().catch(() => ({}));
    throw new Error(said.sentence || `The page cannot be served: ${answer.status}.`);
  }
  return answer;
}

function door() {
  sessionStorage.removeItem("token");
  find("door").hidden = false;
  find("room").hidden = true;
  find("summary").textContent = "";
}

function complain(problem) {
  find("problem").textContent = problem.message || String(problem);
  find("problem").hidden = false;
}

function made(tag, text, name) {
  const element = document.createElement(tag);
  element.textContent = text;
  if (name) element.className = name;
  return element;
}

function left(request) {
  if (!request.open) return made("td", "");
  const days = Math.abs(request.days);
  const words = `${days} day${days === 1 ? "" : "s"}${request.days < 0 ? " late" : ""}`;
  return made("td", words, request.days < 0 ? "late" : request.days <= 7 ? "soon" : "");
}

function about(request) {
  const some = request.samples.map((own) => `${own.count} samples of ${own.client}`);
  const all = [...request.clients, ...some].join(", ");
  return all.length > 80 ? `${all.slice(0, 79)}…` : all;
}

function showAll(found) {
  find("summary").textContent = found.summary;
  const rows = found.requests.map((request) => {
    const row = document.createElement("tr");
    const open = made("button", request.number, "link");
    const first = document.createElement("td");
    first.append(open);
    row.append(first, made("td", about(request)), made("td", request.state), made("td", request.due), left(request));
    row.classList.toggle("chosen", request.number === chosen);
    row.addEventListener("click", () => choose(request.number));
    return row;
  });
  find("requests").tBodies[0].replaceChildren(...rows);
  find("none").hidden = rows.length > 0;
  find("gone-count").textContent = found.tombstones.length;
  find("tombstones").replaceChildren(
    ...found.tombstones.map((own) => {
      const item = made("li", own.name);
      item.append(made("small", `left by ${own.request}, known by ${own.digest.slice(0, 16)}…`));
      return item;
    }),
  );
  const work = found.progress;
  find("working").hidden = !work.step;
  if (work.step) {
    find("work-what").textContent = work.requests.join(", ");
    find("work-step").textContent = work.total ? `${work.step}: ${work.done} of ${work.total}` : work.step;
    const bar = find("work-bar");
    if (work.total) {
      bar.max = work.total;
      bar.value = work.done;
    } else bar.removeAttribute("value");
  }
}

function showOne(found) {
  const text = JSON.stringify(found);
  find("one").hidden = false;
  if (text === shown) return;
  shown = text;
  find("one-title").textContent = `${found.number}: ${found.state}`;
  find("one-about").textContent = `${about(found)}. ${found.ground}. Received on ${found.received}, due on ${found.due}.`;
  find("one-waits").textContent = found.waits + (found.note ? ` Note: ${found.note}` : "");
  find("accept").hidden = found.state !== "received";
  find("papers").hidden = !found.receipt;
  find("timeline").replaceChildren(
    ...found.events.map((event) => {
      const item = made("li", event.sentence, event.kind);
      item.prepend(made("time", `${event.time.slice(0, 19).replace("T", " ")}, ${event.by}`));
      return item;
    }),
  );
  find("told").hidden = !found.recipients.length;
  find("recipients").replaceChildren(
    ...found.recipients.map((own) => {
      const item = made("li", own.name);
      item.append(made("small", own.told ? `told on ${own.told}` : "not told yet"));
      return item;
    }),
  );
  find("audit").hidden = !found.audit;
  if (found.audit) {
    find("audit-word").textContent = found.audit.word;
    find("audit-word").className = found.audit.passed ? "good" : found.audit.passed === false ? "bad" : "soon";
    find("audit-sentence").textContent = found.audit.sentence;
    find("picture").replaceChildren(...picture(found.audit.margins));
  }
}

// Left is where retrained models are (0), right where the trained model is (1); the band is what passes.
function picture(margins) {
  const drawn = (margins || []).filter((own) => own.left !== undefined);
  if (!drawn.length) return [];
  const space = "http://www.w3.org/2000/svg";
  const at = (share) => 170 + 200 * (Math.min(1.25, Math.max(-0.5, share)) + 0.5) / 1.75;
  const part = (tag, values, text) => {
    const element = document.createElementNS(space, tag);
    for (const [name, value] of Object.entries(values)) element.setAttribute(name, value);
    if (text) element.textContent = text;
    return element;
  };
  const height = 24 * drawn.length + 34;
  const svg = part("svg", { viewBox: `0 0 380 ${height}`, role: "img" });
  svg.append(part("title", {}, drawn.map((own) => `${own.measure}: ${own.left} left, ${own.outcome}`).join("; ")));
  for (const [share, words] of [[0, "retrained"], [1, "trained"]]) {
    svg.append(part("line", { x1: at(share), x2: at(share), y1: 4, y2: height - 22, class: "axis" }));
    svg.append(part("text", { x: at(share), y: height - 8, "text-anchor": "middle" }, words));
  }
  drawn.forEach((own, row) => {
    const y = 16 + 24 * row;
    const band = at(own.margin) - at(-own.margin);
    svg.append(part("text", { x: 0, y: y + 4 }, own.measure.replaceAll("_", " ")));
    svg.append(part("rect", { x: at(-own.margin), y: y - 8, width: band, height: 16, class: "margin" }));
    svg.append(part("circle", { cx: at(own.left), cy: y, r: 5, class: own.outcome }));
  });
  return [svg, made("p", "Dots: how much of what the trained model shows is left. Bands: how much would pass.")];
}

async function choose(number) {
  chosen = number;
  find("own-checked").replaceChildren();
  await refresh();
  find("one").scrollIntoView({ block: "nearest", behavior: "smooth" });
}

async function refresh() {
  try {
    const found = await (await ask("overview")).json();
    find("door").hidden = true;
    find("room").hidden = false;
    showAll(found);
    if (chosen) showOne(await (await ask(`requests/${chosen}`)).json());
  } catch (problem) {
    complain(problem);
  }
}

async function download(path, name) {
  const content = await (await ask(path)).blob();
  const link = made("a", "");
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

async function check(text, where) {
  const found = await (await ask("verify", { receipt: text })).json();
  const title = made("p", found.valid ? "The receipt is valid." : "The receipt is NOT valid.", found.valid ? "good" : "bad");
  where.replaceChildren(title, ...found.lines.map((line) => made("p", line)));
}

function onSubmit(id, work) {
  find(id).addEventListener("submit", async (event) => {
    event.preventDefault();
    find("problem").hidden = true;
    try {
      await work(event.target, new FormData(event.target));
    } catch (problem) {
      complain(problem);
    }
  });
}

const onClick = (element, work) => element.addEventListener("click", () => work().catch(complain));

onSubmit("enter", async (form, values) => {
  token = values.get("token").trim();
  sessionStorage.setItem("token", token);
  form.reset();
  await refresh();
});

onSubmit("file", async (form, values) => {
  const text = (name) => values.get(name).trim();
  const body = { ground: text("ground") };
  for (const name of ["received", "checked_by", "note"]) if (text(name)) body[name] = text(name);
  const numbers = text("samples").split(/[\s,]+/).filter(Boolean).map(Number);
  if (numbers.some((number) => !Number.isInteger(number))) throw new Error("Samples are whole numbers: 0, 5, 9.");
  if (numbers.length) body.samples = { [text("client")]: numbers };
  else body.clients = [text("client")];
  const filed = await (await ask("requests", body)).json();
  form.reset();
  find("new").open = false;
  await choose(filed.number);
  if (filed.notes.length) complain(filed.notes.join(" "));
});

onSubmit("accept", async (form, values) => {
  await ask(`requests/${chosen}/accept`, { checked_by: values.get("checked_by") });
  form.reset();
  await refresh();
});

onSubmit("verify", async (form, values) => check(await values.get("receipt").text(), find("checked")));
onClick(find("receipt"), () => download(`requests/${chosen}/receipt`, `${chosen}.intoto.jsonl`));
onClick(find("certificate"), () => download(`requests/${chosen}/certificate`, `${chosen}.html`));
onClick(find("check-own"), async () => check(await (await ask(`requests/${chosen}/receipt`)).text(), find("own-checked")));
for (const button of document.querySelectorAll("[data-download]"))
  onClick(button, () => download(button.dataset.download, button.dataset.download));

if (token) refresh();
else door();
setInterval(() => {
  if (!find("room").hidden && !document.hidden) refresh();
}, 1000);
