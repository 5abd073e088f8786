
"use strict";
// Shows the agent's status, and asks for it again each second. Every text is untrusted: it is put into the page as text only.

const EVERY = 1000, PATIENCE = 5000; // milliseconds
const MOST_ROWS = 200, MOST_WAITING = 4;
const at = id => document.getElementById(id);
let goneSince = null;

function element(name, text, kind) {
  const found = document.createElement(name);
  if (text !== undefined) found.textContent = text;
  if (kind) found.className = kind;
  return found;
}

const count = n => Math.round(n || 0).toLocaleString("en");
const seconds = s => s >= 3600 ? `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min`
  : s >= 100 ? `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s` : `${(s || 0).toFixed(1)} s`;
const several = (n, one, more) => `${count(n)} ${n === 1 ? one : more}`;

function fewOf(texts, most) {
  return texts.slice(0, most).join(", ") + (texts.length > most ? ` and ${count(texts.length - most)} more` : "");
}

// A row's cells are texts, or [text, class, small text].
function fill(table, rows) {
  const heads = [...table.tHead.rows[0].cells];
  table.tBodies[0].replaceChildren(...rows.slice(0, MOST_ROWS).map(cells => {
    const row = element("tr");
    cells.forEach((cell, n) => {
      const [text, kind, small] = Array.isArray(cell) ? cell : [cell];
      const made = element("td", undefined, heads[n].className);
      made.dataset.head = heads[n].textContent;
      const inner = made.appendChild(element("span", text, kind));
      if (small) inner.appendChild(element("small", small));
      row.appendChild(made);
    });
    return row;
  }));
}

function figures(status) {
  const flights = status.flights, store = status.store;
  const waiting = flights.reduce((sum, flight) => sum + flight.waiting.length, 0);
  const away = status.breaker.filter(each => each.state === "open").map(each => `${each.service} is away`);
  const found = [
    ["kernels under way", count(flights.length)],
    ["ranks that wait", count(waiting)],
    ["clients", count(status.clients)],
    ["leases held", count(status.leases)],
    [away.length ? `coordinates; ${away.join(", ")}` : "coordinates", status.coordinates, away.length ? "bad" : ""],
    store ? ["store", store.usable ? "well" : "not usable", store.usable ? "" : "bad"] : ["store", "none"],
    ["uploads to the store", count(status.uploads)],
    ["artifacts in packs", count(Object.values(status.packs).reduce((sum, pack) => sum + pack.artifacts, 0))],
  ];
  at("figures").replaceChildren(...found.map(([term, value, kind]) => {
    const pair = element("div");
    pair.append(element("dt", term), element("dd", value, kind));
    return pair;
  }));
}

function show(status) {
  figures(status);
  at("notices").hidden = !status.notices.length;
  at("notices").replaceChildren(...status.notices.slice(-10).map(line => element("li", line)));
  const flights = [...status.flights].sort((a, b) => b.seconds - a.seconds);
  at("flights").hidden = !flights.length;
  at("idle").hidden = Boolean(flights.length);
  fill(at("flights"), flights.map(flight => [
    [flight.name, "name"],
    [flight.state, flight.state === "compiling" ? "compiling" : "waiting"],
    flight.leader || "",
    flight.seconds.toFixed(1),
    flight.waiting.length ? `${count(flight.waiting.length)}: ${fewOf(flight.waiting, MOST_WAITING)}` : "nobody",
    [flight.key.slice(0, 12), "key"],
  ]));
  const pools = Object.entries(status.pools).filter(([, pool]) => pool.running || pool.compiled || pool.failed);
  at("pool").hidden = !pools.length;
  fill(at("pool").querySelector("table"), pools.map(([job, pool]) => [
    [job, "name", pool.failures.length ? `the last failure: ${pool.failures[pool.failures.length - 1]}` : ""],
    pool.busy.length ? fewOf(pool.busy, MOST_WAITING) : "nothing now",
    count(pool.queued), count(pool.compiled), count(pool.used), [count(pool.failed), pool.failed ? "bad" : ""],
  ]));
  const jobs = Object.entries(status.jobs).reverse();
  at("jobs").hidden = !jobs.length;
  fill(at("jobs").querySelector("table"), jobs.map(([job, c]) => [
    [job, "name", fewOf(c.stood_aside.map(each => `stood aside from ${each.part} (${each.why})`), MOST_WAITING)],
    count(c.requests), count(c.compiles), count(c.memory_hits + c.local_hits + c.store_hits + c.waits),
    count(c.waits), [count(c.failures), c.failures ? "bad" : ""], [count(c.alone), c.alone ? "waiting" : ""],
    seconds(c.compile_seconds), seconds(c.saved_seconds),
  ]));
  const store = status.store ? `, store ${status.store.root}` : "";
  at("about").textContent = `Agent ${status.agent}, process ${status.pid}, kcoord ${status.version}, up `
    + `${seconds(status.now - status.started)}${store}`;
}

const clock = () => new Date().toLocaleTimeString("en-GB");

function said(alive, why) {
  goneSince = alive ? null : goneSince || clock();
  document.body.classList.toggle("gone", !alive);
  const text = alive ? "live" : `no answer since ${goneSince}: ${why}`;
  if (at("live").textContent !== text) at("live").textContent = text;
}

async function look() {
  try {
    const answer = await fetch("status.json", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
    if (!answer.ok) throw new Error("the agent is busy or ends");
    show(await answer.json());
    said(true);
  } catch (error) {
    said(false, error instanceof TypeError ? "the agent has gone" : error.name === "TimeoutError" ? "the agent hangs" : error.message);
  }
}

async function follow() {
  if (!document.hidden) await look();
  setTimeout(follow, EVERY);
}

show(JSON.parse(at("now").textContent));
said(true);
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
setTimeout(follow, EVERY);
