// The conversation: it is sent whole with every question, and streamed as it is answered.

import { call, problemOf } from "./access.js";
import { byId, figure, h } from "./dom.js";

const NEAR_END_PX = 80;
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];

export class Chat {
  #messages = [];
  #abort = null;
  #model = "";
  #onRefused;

  /** `onRefused` is called when the gateway asks for a key. */
  constructor(onRefused) {
    this.#onRefused = onRefused;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    byId("prompt").addEventListener("input", fitPrompt);
    byId("stop").addEventListener("click", () => this.stop());
    byId("new-chat").addEventListener("click", () => this.clear());
    byId("model").addEventListener("change", () => (this.#model = byId("model").value));
  }

  get isBusy() {
    return this.#abort !== null;
  }

  /** Let questions go to one of these models; the first is the group's own, others are adapters. */
  useModels(names) {
    if (!names.includes(this.#model)) this.#model = names[0];
    byId("model").replaceChildren(...names.map((name) => h("option", { value: name, selected: name === this.#model }, name)));
    byId("model-label").hidden = names.length < 2;
  }

  /** End the answer that is being streamed; what came of it stays. */
  stop() {
    this.#abort?.abort();
  }

  /** Begin a new conversation. */
  clear() {
    this.stop();
    this.#messages = [];
    for (const each of [...byId("log").querySelectorAll(".message")]) each.remove();
    byId("welcome").hidden = false;
    byId("pace").textContent = "";
    byId("prompt").focus();
  }

  /** Send what is written. */
  async send() {
    const text = byId("prompt").value.trim();
    if (!text || this.isBusy) return;
    byId("prompt").value = "";
    fitPrompt();
    byId("welcome").hidden = true;
    const question = { role: "user", content: text };
    this.#messages.push(question);
    const shown = addMessage("user");
    shown.body.textContent = text;
    const answer = new Answer();
    this.#abort = new AbortController();
    setBusy(true);
    try {
      await this.#stream(answer, this.#abort.signal);
      answer.end("");
    } catch (error) {
      answer.end(error.name === "AbortError" ? "stopped" : "", error.name === "AbortError" ? "" : error.message);
    }
    this.#abort = null;
    setBusy(false);
    if (answer.text) this.#messages.push({ role: "assistant", content: answer.text });
    else this.#takeBack(question, text);
  }

  /** Take a question without an answer out of the conversation, and offer it again. */
  #takeBack(question, text) {
    this.#messages = this.#messages.filter((message) => message !== question);
    if (!byId("prompt").value) byId("prompt").value = text;
    fitPrompt();
  }

  async #stream(answer, signal) {
    const response = await call("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(this.#request()),
      signal,
    });
    if (response.status === 401 || response.status === 403) this.#onRefused(await problemOf(response.clone()));
    if (!response.ok) throw new Error(await problemOf(response));
    for await (const data of eventsOf(response.body)) {
      if (data === "[DONE]") return;
      answer.take(JSON.parse(data));
    }
    throw new Error("the stream broke before the answer ended");
  }

  #request() {
    const system = byId("system").value.trim();
    const asked = {
      model: this.#model,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.#messages],
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
    for (const name of NUMBERS) {
      const input = byId("composer").elements[name];
      if (input.value !== "") asked[name] = Number(input.value);
    }
    return asked;
  }
}

/** One answer on its way: its text, its thoughts, and how fast it comes. */
class Answer {
  text = "";
  #thoughts = "";
  #asked = performance.now();
  #first = 0;
  #last = 0;
  #tokens = 0;
  #prompt = 0;
  #reason = "";

  constructor() {
    const { message, body } = addMessage("assistant");
    this.message = message;
    this.body = body;
    message.setAttribute("aria-busy", "true");
  }

  /** Take a chunk of the stream. */
  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) {
      this.#tokens = chunk.usage.completion_tokens || 0;
      this.#prompt = chunk.usage.prompt_tokens || 0;
    }
    const choice = chunk.choices?.[0];
    const { content, reasoning_content: thought } = choice?.delta ?? {};
    this.#reason = choice?.finish_reason || this.#reason;
    if (!content && !thought) return;
    this.#last = performance.now();
    this.#first ||= this.#last;
    const follows = isNearEnd();
    if (thought) this.#think(thought);
    if (content) {
      this.text += content;
      this.body.replaceChildren(...blocksOf(this.text));
    }
    byId("pace").textContent = this.#pace();
    if (follows) scrollToEnd();
  }

  /** Show that the answer has ended, and why if not by itself. */
  end(how, problem = "") {
    this.message.removeAttribute("aria-busy");
    const words = [how, this.#reason === "length" ? "cut at the longest length" : "", this.#figures()].filter(Boolean);
    if (words.length) this.message.append(h("p", { class: "meta" }, words.join(" · ")));
    if (problem) this.message.append(h("p", { class: "problem", role: "alert" }, problem));
    byId("pace").textContent = "";
    scrollToEnd();
  }

  #think(thought) {
    if (!this.thinking) {
      this.thinking = h("p");
      this.body.before(h("details", { class: "thoughts", open: true }, h("summary", {}, "Thoughts"), this.thinking));
    }
    this.#thoughts += thought;
    this.thinking.textContent = this.#thoughts;
  }

  #pace() {
    const seconds = (this.#last - this.#first) / 1000;
    return this.#tokens > 1 && seconds > 0 ? `${figure((this.#tokens - 1) / seconds)} tok/s` : "";
  }

  #figures() {
    if (!this.#first) return "";
    const first = `first after ${((this.#first - this.#asked) / 1000).toFixed(2)} s`;
    return [`${this.#prompt} + ${this.#tokens} tokens`, first, this.#pace()].filter(Boolean).join(" · ");
  }
}

/** Yield the data of each event of a stream. */
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) if (event.startsWith("data: ")) yield event.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Return text as elements: fenced code in boxes of its own, everything as text. */
function blocksOf(text) {
  return text.split(/^```/m).map((part, index) => {
    if (index % 2 === 0) return part.trim() ? h("p", {}, part.trim()) : null;
    const [, ...lines] = part.split("\n");
    return h("pre", { tabindex: "0" }, h("code", {}, lines.join("\n").replace(/\n$/, "")));
  }).filter((block) => block !== null);
}

function addMessage(role) {
  const body = h("div", { class: "body" });
  const message = h("article", { class: `message ${role}`, "aria-label": role === "user" ? "You" : "Model" }, body);
  byId("log").append(message);
  scrollToEnd();
  return { message, body };
}

function setBusy(isBusy) {
  byId("stop").hidden = !isBusy;
  byId("send").hidden = isBusy;
  if (!isBusy && document.activeElement === document.body) byId("prompt").focus();
}

function isNearEnd() {
  const log = byId("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PX;
}

function scrollToEnd() {
  byId("log").scrollTop = byId("log").scrollHeight;
}

function fitPrompt() {
  const prompt = byId("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}
