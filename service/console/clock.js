// Fleet time, as far as this page can know it: each answer says as of when it is and how old it was when sent.

const BACKWARDS_MS = 120_000; // further back than late answers explain: the fleet's clock was set anew

export class FleetClock {
  /** `wallMs` gives this machine's time. */
  constructor(wallMs = () => Date.now()) {
    this.wallMs = wallMs;
    this.speed = 1;
    this.anchor = null;
  }

  /** Learn from an answer. The newest of what answers imply is right: each is late by its own journey, never early. */
  note(asOfMs, ageS, speed = this.speed) {
    const fleetMs = asOfMs + ageS * 1000;
    const known = this.nowMs();
    const jumped = known !== null && fleetMs < known - BACKWARDS_MS * Math.max(1, speed);
    if (known === null || jumped || speed !== this.speed || fleetMs > known) {
      this.anchor = { fleetMs: known === null || jumped ? fleetMs : Math.max(known, fleetMs), wallMs: this.wallMs() };
    }
    this.speed = speed;
  }

  /** Fleet time now, null before the first answer. */
  nowMs() {
    return this.anchor === null ? null : this.anchor.fleetMs + (this.wallMs() - this.anchor.wallMs) * this.speed;
  }
}
