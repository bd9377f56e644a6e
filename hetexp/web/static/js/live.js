// What happens now: over a WebSocket, and by asking again and again while there is none.

import { api, token } from "./api.js";

const WAITS = [500, 1000, 2000, 4000, 8000];
const POLL_MS = 3000;
const SILENT_MS = 30000; // samples come every second or few: a longer silence is a dead connection

const READINGS = ["utilisation", "memory_used_bytes", "memory_free_bytes", "temperature_c", "power_w", "clock_mhz", "memory_clock_mhz", "fan", "throttle", "busy_by"];

/** A device without the readings of a sample that is too old to be what happens now. */
const current = (device) => device.stale ? { ...device, ...Object.fromEntries(READINGS.map((name) => [name, null])), busy: false } : device;

/** Devices and trainings as last told. Listeners get "devices", "training" (with it), "deleted" (its id) and "state". */
class Live {
  devices = null;
  trainings = new Map();
  state = "connecting"; // live: by WebSocket; polling: by requests; lost: not at all
  heard = null; // when the devices were told, in ms
  #listeners = { devices: new Set(), training: new Set(), deleted: new Set(), state: new Set() };
  #socket = null;
  #tries = 0;
  #poll = null;
  #silence = null;
  #again = null;

  /** Call `listener` whenever `kind` changes. Returns a function that ends it. */
  on(kind, listener) {
    this.#listeners[kind].add(listener);
    return () => this.#listeners[kind].delete(listener);
  }

  start() {
    this.#connect();
    addEventListener("online", () => this.retry());
    document.addEventListener("visibilitychange", () => { if (!document.hidden && this.state !== "live") this.retry(); });
    this.#ask();
  }

  /** Try again now. */
  retry() {
    if (this.state === "live") return;
    this.#tries = 0;
    this.#connect();
  }

  /** Take a training that a request returned. */
  take(training) {
    this.trainings.set(training.id, { ...this.trainings.get(training.id), ...training });
    this.#tell("training", this.trainings.get(training.id));
  }

  /** Forget a training that is no longer in the list. */
  drop(id) {
    this.trainings.delete(id);
    this.#tell("deleted", id);
  }

  #tell(kind, value) { for (const listener of [...this.#listeners[kind]]) listener(value); }

  #become(state) {
    if (state === this.state) return;
    this.state = state;
    this.#tell("state", state);
  }

  #connect() {
    clearTimeout(this.#again);
    this.#socket?.close();
    const address = new URL("api/v1/live", location.href);
    address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
    address.hash = "";
    const socket = new WebSocket(address);
    this.#socket = socket;
    socket.onopen = () => {
      const secret = token();
      if (secret) socket.send(JSON.stringify({ token: secret }));
      this.#listen();
    };
    socket.onmessage = (event) => {
      this.#listen();
      if (this.state !== "live") this.#arrived(); // only a message says that the token was taken
      const message = JSON.parse(event.data);
      if (message.kind === "sample") this.#sample(message.devices);
      else if (message.kind === "training") this.take(message.training);
      else if (message.kind === "deleted") this.drop(message.id);
    };
    socket.onclose = () => {
      if (socket !== this.#socket) return;
      clearTimeout(this.#silence);
      if (this.state === "live") this.#become("lost");
      this.#ask();
      this.#again = setTimeout(() => this.#connect(), WAITS[Math.min(this.#tries, WAITS.length - 1)]);
      this.#tries += 1;
    };
  }

  #arrived() {
    this.#tries = 0;
    clearTimeout(this.#poll);
    this.#become("live");
    this.#trainings(); // what changed while nobody listened
  }

  #listen() {
    clearTimeout(this.#silence);
    this.#silence = setTimeout(() => this.#socket?.close(), SILENT_MS);
  }

  #sample(devices) {
    this.devices = devices.map(current);
    this.heard = Date.now();
    this.#tell("devices", this.devices);
  }

  async #trainings() {
    try {
      for (const training of await api.trainings({ limit: 50 })) this.take(training);
    } catch (error) { /* the state tells it */ }
  }

  async #ask() {
    clearTimeout(this.#poll);
    try {
      const devices = await api.devices();
      this.#sample(devices);
      if (this.state === "live") return;
      await this.#trainings();
      if (this.state !== "live") this.#become("polling");
    } catch (error) {
      if (this.state !== "live") this.#become("lost");
    }
    if (this.state !== "live") this.#poll = setTimeout(() => this.#ask(), POLL_MS);
  }
}

export const live = new Live();
