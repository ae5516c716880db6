// Looks at a group over time, and what follows from two of them: rates, times of steps, and events. Counts of a gateway
// begin again when it is replaced, and those of a rank with every epoch; differences are taken only where both looks
// count from the same beginning. `hetero top` has the same rules.

const WINDOW_S = 5;
const TREND_S = 120;
const MAX_EVENTS = 40;

/** Return an enum's word, e.g. "ready" of GROUP_STATE_READY; "" for an unspecified one. */
export function word(name, prefix) {
  const text = (name || "").replace(prefix, "").toLowerCase();
  return text === "unspecified" ? "" : text;
}

/** Return the word for a group's state. */
export function stateOf(topology) {
  return word(topology.state, "GROUP_STATE_");
}

const TOKENS = ["prompt_tokens", "cached_tokens"];
const sum = (stats, names) => names.reduce((total, name) => total + Number(stats[name]), 0);

export class History {
  looks = [];
  events = [];
  trend = []; // {at_s, rate, state, epoch} of the last minutes
  #held = []; // by rank: the last look in which it held parts of the model
  #silentSince = null;
  #downSince = null;

  get last() {
    return this.looks[this.looks.length - 1];
  }

  /** Take a look in, and note what changed since the one before. */
  add(look) {
    if (this.looks.length) this.#noteChanges(this.last, look);
    if (this.looks.length && look.now_s < this.last.now_s) this.#restart();
    this.looks.push(look);
    while (look.now_s - this.looks[0].now_s > WINDOW_S) this.looks.shift();
    const topology = look.topology;
    topology.ranks.forEach((rank, index) => {
      if (rank.runs.length) this.#held[index] = rank;
    });
    this.trend.push({ at_s: look.now_s, rate: this.rates().generated, state: stateOf(topology), epoch: topology.epoch });
    while (look.now_s - this.trend[0].at_s > TREND_S) this.trend.shift();
  }

  /** Return the ranks; one that holds nothing now with the device and the parts that it had, and `isPast`. */
  ranks() {
    return this.last.topology.ranks.map((rank, index) => {
      const held = this.#held[index];
      if (rank.runs.length || !held) return rank;
      const place = { ...rank.place, device: rank.joined ? rank.place.device : held.place.device };
      return { ...rank, place, runs: held.runs, shard: held.shard, isPast: true };
    });
  }

  /** Note that the gateway does not answer; once until it does. */
  noteSilence(problem) {
    if (this.#silentSince !== null) return;
    this.#silentSince = performance.now();
    this.#note(problem, "bad");
  }

  /** Return tokens and steps a second within the window. */
  rates() {
    const first = this.looks[0];
    const last = this.last;
    const seconds = last.now_s - first.now_s;
    const restarted = Number(last.stats.steps) < Number(first.stats.steps);
    if (!seconds || restarted) return { generated: 0, prompt: 0, steps: 0 };
    const rate = (names) => (sum(last.stats, names) - sum(first.stats, names)) / seconds;
    return { generated: rate(["generated_tokens"]), prompt: rate(TOKENS), steps: rate(["steps"]) };
  }

  /** Return mean times of a rank's steps of one kind, "decode" or "prefill"; null where there were none. */
  pace(index, kind) {
    const last = this.last;
    const first = this.looks.find((look) => look.topology.epoch === last.topology.epoch);
    const now = last.topology.ranks[index][kind];
    if (!now) return null;
    const then = first !== last ? first.topology.ranks[index]?.[kind] : null;
    const counted = (times, name) => Number(times?.[name] || 0);
    const begin = then && counted(then, "steps") < counted(now, "steps") ? then : null;
    const steps = counted(now, "steps") - counted(begin, "steps");
    if (!steps) return null;
    const mean = (name) => (counted(now, name) - counted(begin, name)) / steps;
    return { steps, step_s: mean("seconds"), exchange_s: mean("exchange_s") };
  }

  #restart() {
    this.looks = [];
    this.trend = [];
  }

  #noteChanges(before, now) {
    if (this.#silentSince !== null) {
      this.#note(`The gateway answers again, after ${seconds(performance.now() - this.#silentSince)}`, "good");
      this.#silentSince = null;
    }
    const [old, state] = [stateOf(before.topology), stateOf(now.topology)];
    this.#noteRanks(before.topology, now.topology);
    if (old === state && before.topology.epoch === now.topology.epoch) return;
    const down = this.#downSince ?? performance.now();
    const healed = state === "ready" && this.#downSince !== null ? `, after ${seconds(performance.now() - down)}` : "";
    // Why an epoch ended is said once; an end that fell between two looks shows in the next epoch.
    const ended = state === "aborted" || (old !== "aborted" && before.topology.epoch !== now.topology.epoch);
    const reason = ended && now.topology.reason ? `: ${now.topology.reason}` : "";
    const tone = state === "ready" ? "good" : ended ? "bad" : "";
    this.#note(`Epoch ${now.topology.epoch} is ${state}${healed}${reason}`, tone);
    if (state === "ready") this.#downSince = null;
    else if (old === "ready") this.#downSince = performance.now();
  }

  #noteRanks(before, now) {
    now.ranks.forEach((rank, index) => {
      const was = before.ranks[index];
      if (!was || was.joined === rank.joined) return;
      this.#note(`Rank ${index} ${rank.joined ? "joined" : "is gone"}`, rank.joined ? "" : "bad");
    });
  }

  #note(text, tone) {
    this.events.unshift({ clock: new Date().toLocaleTimeString("en-GB"), text, tone });
    this.events.length = Math.min(this.events.length, MAX_EVENTS);
  }
}

function seconds(milliseconds) {
  return `${(milliseconds / 1000).toFixed(1)} s`;
}
