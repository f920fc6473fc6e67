"use strict";
const REFRESH_MS = 5000;
const find = (id) => document.getElementById(id);
let token = sessionStorage.getItem("raytrec-token") ?? "", overview = null;

// Send a request; return the response and its text.
async function ask(path, options = {}) {
  const headers = { ...options.headers, ...(token && { Authorization: `Bearer ${token}` }) };
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  return { answer, text: await answer.text() };
}

// Create an element with text. Data is never parsed as HTML.
function makeElement(tag, text = "", kind = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = kind;
  return element;
}
const facts = (pairs) => pairs.flatMap(([name, value]) => [makeElement("dt", name), makeElement("dd", value)]);

function age(seconds) {
  const units = [["days", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const [name, size] = units.find(([, size]) => seconds >= 2 * size) ?? units[3];
  return `${Math.floor(seconds / size)} ${name}`;
}
const number = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3))));

function describeFreshness({ delta, seconds_behind, ended, problem }) {
  const text = `delta ${delta.toLocaleString("en")}, ${number(seconds_behind)} s behind`;
  return `${text}${ended ? ", the run has ended" : ""}${problem ? `. Not updated: ${problem}` : ""}`;
}

function show() {
  const { model, before, replicas, challenger, freshness } = overview, versions = Object.values(replicas);
  find("name").textContent = document.title = model.run;
  const how = versions.length === 1 ? "1 replica" : `${versions.length} replicas`;
  find("state").textContent = `${model.version} · ${how}`;
  find("model").replaceChildren(...facts([
    ["version", model.version],
    ["trained", `run ${model.run}, step ${model.step.toLocaleString("en")}`],
    ["exported", `${new Date(model.made).toLocaleString()}, ${age(model.age_s)} ago`],
    ["previous", before ?? "none"],
    ["challenger", challenger ? `${challenger.version}: ${challenger.mode}, ${number(100 * challenger.share)} % of requests` : "none"],
    ...(freshness ? [["freshness", describeFreshness(freshness)]] : []),
  ]));
  find("differ").hidden = freshness || new Set(versions).size < 2;
  find("replicas").replaceChildren(...Object.entries(replicas).map(([name, version]) => {
    const row = makeElement("tr");
    row.append(makeElement("td", name), makeElement("td", version, version === model.version ? "" : "bad"));
    return row;
  }));
  find("ask-token").hidden = true;
  find("all").hidden = false;
}

// Return the parts of an error: error, where, expected and do.
function errorOf(text) {
  try {
    return Object.entries(JSON.parse(text)).map(([name, value]) => [name, String(value)]);
  } catch {
    return [["error", text || "empty response"]];
  }
}

async function refresh() {
  try {
    const { answer, text } = await ask("model");
    if (answer.ok) {
      const first = !overview;
      overview = JSON.parse(text);
      show();
      if (first) find("body").value = (await ask("example")).text;
    } else if (answer.status === 401) {
      find("state").textContent = token ? "The service rejected this token." : "The service requires a token.";
      find("ask-token").hidden = false;
      find("all").hidden = true;
    } else {
      find("state").textContent = errorOf(text).map(([name, value]) => `${name}: ${value}`).join(" · ");
    }
  } catch (error) {
    find("state").textContent = `The service does not respond: ${error.message}`;
  }
}

find("ask-token").addEventListener("submit", (event) => {
  event.preventDefault();
  token = find("token").value.trim();
  sessionStorage.setItem("raytrec-token", token);
  find("token").value = "";
  refresh();
});

find("try").addEventListener("submit", async (event) => {
  event.preventDefault();
  const began = performance.now(), body = find("body").value;
  let status = "", parts = [], result = "";
  try {
    const { answer, text } = await ask("predict", { method: "POST", body, headers: { "Content-Type": "application/json" } });
    status = `${answer.status}${answer.ok ? "" : ` ${answer.statusText}`}`;
    if (answer.ok) result = text; else parts = errorOf(text);
  } catch (error) {
    status = `no response: ${error.message}`;
  }
  find("outcome").textContent = `${status} · ${number(performance.now() - began)} ms`;
  find("outcome").className = result ? "" : "bad";
  find("error").replaceChildren(...facts(parts));
  find("error").hidden = !parts.length;
  find("answer").textContent = result;
  find("answer").hidden = !result;
});

setInterval(() => {
  if (!document.hidden && find("ask-token").hidden) refresh();  // not while the token form is open
}, REFRESH_MS);
refresh();
