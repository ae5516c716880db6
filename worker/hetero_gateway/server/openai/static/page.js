// The page: views, the theme, the key, and a look at the group twice a second.

import { call, problemOf, useKey } from "./access.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { History, stateOf } from "./history.js";
import { draw } from "./picture.js";

const LOOK_MS = 500;
const HURRIED_LOOK_MS = 250; // while the group does not serve
const THEMES = ["auto", "light", "dark"];

let history = new History();
let looking = 0;
const chat = new Chat(askKey);

// --- views, theme and keys of the keyboard -------------------------------------------------------------------

const tabs = [byId("tab-chat"), byId("tab-group")];

function choose(tab) {
  for (const each of tabs) {
    each.setAttribute("aria-selected", String(each === tab));
    each.tabIndex = each === tab ? 0 : -1;
  }
  byId("main").dataset.view = tab.getAttribute("aria-controls");
}

for (const tab of tabs) {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = tabs[1 - tabs.indexOf(tab)];
    choose(other);
    other.focus();
  });
}

byId("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const next = THEMES[(THEMES.indexOf(root.dataset.theme || "auto") + 1) % THEMES.length];
  root.dataset.theme = next;
  byId("theme").textContent = `Theme: ${next}`;
});

byId("settings-button").addEventListener("click", () => {
  const settings = byId("settings");
  settings.hidden = !settings.hidden;
  byId("settings-button").setAttribute("aria-expanded", String(!settings.hidden));
});

document.addEventListener("keydown", (event) => {
  const writes = event.target.closest("input, textarea, select, dialog");
  if (event.key === "Escape" && !byId("key-dialog").open) chat.stop();
  if (event.key !== "/" || writes || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  choose(tabs[0]);
  byId("prompt").focus();
});

// --- the key -------------------------------------------------------------------------------------------------

function askKey(problem = "") {
  byId("key-button").hidden = false;
  byId("key-problem").textContent = problem;
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

byId("key-button").addEventListener("click", () => askKey());
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  useKey(byId("key").value);
  const answer = await call("v1/models");
  // A key of role admin alone may look, and not chat.
  if (answer.status === 401) return askKey(await problemOf(answer));
  byId("key").value = "";
  byId("key-dialog").close();
  byId("prompt").focus();
  await start();
});

// --- the group -----------------------------------------------------------------------------------------------

function note(text) {
  byId("note").textContent = text;
  byId("note").hidden = !text;
}

function showState(topology) {
  const state = stateOf(topology);
  byId("state").hidden = false;
  byId("state").textContent = state;
  byId("state").dataset.state = state;
}

/** Look at the group; return whether to look again. */
async function look() {
  let answer;
  try {
    answer = await call("page/status");
  } catch {
    if (history.looks.length) {
      history.noteSilence("The gateway does not answer");
      draw(history);
    }
    note("The gateway does not answer; trying again.");
    return true;
  }
  if (answer.status === 401 || answer.status === 403) {
    const needs = answer.status === 401 ? "The group is shown to keys of role admin." : "This key does not show the group: that takes the role admin.";
    byId("picture").hidden = true;
    byId("state").hidden = true;
    note(needs);
    return false;
  }
  if (!answer.ok) {
    note(await problemOf(answer));
    return true;
  }
  history.add(await answer.json());
  note("");
  showState(history.last.topology);
  byId("picture").hidden = false;
  draw(history);
  return true;
}

async function keepLooking() {
  const mine = ++looking;
  for (;;) {
    const goesOn = document.hidden || (await look());
    if (!goesOn || mine !== looking) return;
    const isReady = history.looks.length && stateOf(history.last.topology) === "ready";
    await new Promise((resolve) => setTimeout(resolve, isReady ? LOOK_MS : HURRIED_LOOK_MS));
    if (mine !== looking) return;
  }
}

async function showModels() {
  const answer = await call("v1/models");
  if (answer.status === 401) return askKey();
  if (!answer.ok) return;
  const names = (await answer.json()).data.map((model) => model.id);
  byId("name").textContent = names[0];
  byId("welcome-name").textContent = `Ask ${names[0]}`;
  document.title = `${names[0]} · HeteroInference`;
  chat.useModels(names);
}

async function start() {
  history = new History();
  keepLooking();
  try {
    await showModels();
  } catch {
    // The look at the group says that the gateway does not answer.
  }
}

start();
