"use strict";
const REFRESH_MS = 5000, HEIGHT = 200, LEFT = 52, RIGHT = 12, TOP = 10, BOTTOM = 22;
const find = (id) => document.getElementById(id);
let token = sessionStorage.getItem("raytrec-token") ?? "", minutes = 15, seen = null;

// Asks the service: the answer and its text.
async function ask(path, options = {}) {
  const headers = { ...options.headers, ...(token && { Authorization: `Bearer ${token}` }) };
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  return { answer, text: await answer.text() };
}

// Elements with text: what comes from data is never taken for HTML.
function made(tag, text = "", kind = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = kind;
  return element;
}
const facts = (pairs) => pairs.flatMap(([name, value]) => [made("dt", name), made("dd", value)]);

function drawn(tag, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

function age(seconds) {
  const units = [["days", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const [name, size] = units.find(([, size]) => seconds >= 2 * size) ?? units[3];
  return `${Math.floor(seconds / size)} ${name}`;
}
const number = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3))));
const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false });

// The least round number that is not below a value, and whose quarters are round.
function above(value) {
  const power = 10 ** Math.floor(Math.log10(value || 1));
  return power * [1, 1.2, 1.6, 2, 2.4, 3, 4, 6, 8, 10].find((each) => each * power >= value * 0.999);
}

// A picture of lines over time: [name, colour, values]; values end at course.ended.
function draw(figure, title, unit, lines, course) {
  const width = figure.clientWidth - 2 * parseFloat(getComputedStyle(figure).paddingLeft);
  const top = above(Math.max(0, ...lines.flatMap(([, , values]) => values.map((value) => value ?? 0))));
  const count = lines.length ? lines[0][2].length : 0;
  const span = Math.min(60 * minutes, Math.max(180, count * course.step_s)), began = course.ended - span;
  const x = (seconds) => LEFT + (seconds - began) / span * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM);
  const at = (place) => course.ended - (count - place - 0.5) * course.step_s;
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-label": title });
  for (const part of [0, 0.25, 0.5, 0.75, 1]) {
    svg.append(drawn("line", { x1: LEFT, x2: width - RIGHT, y1: y(part * top), y2: y(part * top) }));
    svg.append(drawn("text", { x: LEFT - 6, y: y(part * top) + 4, "text-anchor": "end" }, number(part * top)));
  }
  const apart = [60, 120, 300, 900].find((each) => span / each <= 5);
  for (let tick = Math.ceil(began / apart) * apart; tick <= course.ended; tick += apart)
    svg.append(drawn("text", { x: x(tick), y: HEIGHT - 5, "text-anchor": "middle" }, clock(tick)));
  for (const [, colour, values] of lines) {
    let path = "", pen = "M";
    values.forEach((value, place) => {
      if (value === null) return void (pen = "M");
      path += `${pen}${x(at(place)).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = "L";
    });
    svg.append(drawn("path", { d: path, class: colour }));
  }
  const mark = svg.appendChild(drawn("line", { y1: TOP, y2: HEIGHT - BOTTOM, class: "at", visibility: "hidden" }));
  const caption = made("figcaption");
  const say = (place) => {
    caption.replaceChildren(made("b", `${title}, ${unit}`), made("span", count ? clock(at(place)) : "", "when"));
    for (const [name, colour, values] of lines) {
      const value = values[place];
      const entry = made("span", ` ${name} ${value === null || value === undefined ? "–" : number(value)}`.trimEnd());
      entry.prepend(made("i", "", colour));
      caption.append(entry);
    }
  };
  const last = count - 1;
  svg.addEventListener("pointermove", (event) => {
    const seconds = began + (event.offsetX - LEFT) / (width - LEFT - RIGHT) * span;
    const place = Math.round(count - 0.5 - (course.ended - seconds) / course.step_s);
    if (place < 0 || place > last) return;
    for (const end of ["x1", "x2"]) mark.setAttribute(end, x(at(place)));
    mark.setAttribute("visibility", "visible");
    say(place);
  });
  svg.addEventListener("pointerleave", () => {
    mark.setAttribute("visibility", "hidden");
    say(last);
  });
  say(last);
  figure.replaceChildren(caption, svg);
}

function colour(status, place) {
  return status.startsWith("2") ? "c0" : status.startsWith("5") ? "c5" : `c${1 + place % 4}`;
}

function drawAll() {
  const course = seen.course, ms = (values) => values.map((value) => value === null ? null : 1000 * value);
  const statuses = Object.entries(course.requests_per_s);
  const lines = statuses.map(([status, values], place) => [status, colour(status, place), values]);
  draw(find("requests"), "Requests", "1/s", lines, course);
  const latency = [["p50", "c0", ms(course.p50_s)], ["p99", "c1", ms(course.p99_s)]];
  draw(find("latency"), "Latency", "ms", latency, course);
  draw(find("rows"), "Rows", "1/s", [["", "c0", course.rows_per_s]], course);
}

function show() {
  const { model, before, replicas } = seen, versions = Object.values(replicas);
  find("name").textContent = document.title = model.run;
  const how = versions.length === 1 ? "1 replica" : `${versions.length} replicas`;
  find("state").textContent = `${model.version} · ${how}`;
  find("model").replaceChildren(...facts([
    ["version", model.version],
    ["trained", `run ${model.run}, step ${model.step.toLocaleString("en")}`],
    ["exported", `${new Date(model.made).toLocaleString()}, ${age(model.age_s)} ago`],
    ["before it", before ?? "none"],
  ]));
  find("differ").hidden = new Set(versions).size < 2;
  find("replicas").replaceChildren(...Object.entries(replicas).map(([name, version]) => {
    const row = made("tr");
    row.append(made("td", name), made("td", version, version === model.version ? "" : "bad"));
    return row;
  }));
  find("ask-token").hidden = true;
  find("all").hidden = false;
  drawAll();
}

// The error of an answer: error, where, expected and do.
function errorOf(text) {
  try {
    return Object.entries(JSON.parse(text)).map(([name, value]) => [name, String(value)]);
  } catch {
    return [["error", text || "an empty answer"]];
  }
}

async function refresh() {
  try {
    const { answer, text } = await ask(`figures?minutes=${minutes}`);
    if (answer.ok) {
      const first = !seen;
      seen = JSON.parse(text);
      show();
      if (first) find("body").value = (await ask("example")).text;
    } else if (answer.status === 401) {
      find("state").textContent = token ? "The service refuses this token." : "The service asks for a token.";
      find("ask-token").hidden = false;
      find("all").hidden = true;
    } else {
      find("state").textContent = errorOf(text).map(([name, value]) => `${name}: ${value}`).join(" · ");
    }
  } catch (error) {
    find("state").textContent = `The service does not answer: ${error.message}`;
  }
}

find("ask-token").addEventListener("submit", (event) => {
  event.preventDefault();
  token = find("token").value.trim();
  sessionStorage.setItem("raytrec-token", token);
  find("token").value = "";
  refresh();
});

find("spans").addEventListener("click", (event) => {
  if (!event.target.dataset.minutes) return;
  minutes = Number(event.target.dataset.minutes);
  for (const each of find("spans").children) each.setAttribute("aria-pressed", each === event.target);
  refresh();
});

find("try").addEventListener("submit", async (event) => {
  event.preventDefault();
  const began = performance.now(), body = find("body").value;
  let status = "", parts = [], shown = "";
  try {
    const { answer, text } = await ask("predict", { method: "POST", body, headers: { "Content-Type": "application/json" } });
    status = `${answer.status}${answer.ok ? "" : ` ${answer.statusText}`}`;
    if (answer.ok) shown = text; else parts = errorOf(text);
  } catch (error) {
    status = `no answer: ${error.message}`;
  }
  find("outcome").textContent = `${status} · ${number(performance.now() - began)} ms`;
  find("outcome").className = shown ? "" : "bad";
  find("error").replaceChildren(...facts(parts));
  find("error").hidden = !parts.length;
  find("answer").textContent = shown;
  find("answer").hidden = !shown;
});

addEventListener("resize", () => seen && drawAll());
setInterval(() => {
  // Not while a token is asked for, and not under a pointer that reads a picture.
  if (!document.hidden && find("ask-token").hidden && !document.querySelector("svg:hover")) refresh();
}, REFRESH_MS);
refresh();
