import { setTimeout as sleep } from 'node:timers/promises';

/** Slows the jobs down, so that a kill and a freeze find some in flight. */
export class Pace {
  constructor(public ms: number) {}

  async wait(): Promise<void> {
    if (this.ms > 0) await sleep(this.ms);
  }
}
