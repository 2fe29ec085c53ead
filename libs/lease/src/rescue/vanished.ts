/** One row of way 1's look. `beat_at` as exact text. */
export interface SessionLook {
  id: string;
  lock_no: number;
  beat_at: string;
  gone: boolean;
}

interface Suspicion {
  since: number;
  beatAt: string;
  lockNo: number;
}

/**
 * Way 1's judgement, from one look to the next. A worker is dead when its session was gone in two looks at least `graceMs` apart,
 * with no beat and no new lock between. When more than one worker and over half of the fleet vanish between two looks, it was the
 * server that lost its sessions: way 1 rests for a TTL, and way 2 decides.
 */
export class VanishedWorkers {
  private readonly suspicions = new Map<string, Suspicion>();
  private restsUntil = 0;

  constructor(
    private readonly graceMs: number,
    private readonly ttlMs: number,
  ) {}

  /** @returns the workers to declare dead; `resting` = none, because too many went at once */
  judge(looks: SessionLook[], now: number): { dead: SessionLook[]; resting: boolean } {
    const gone = looks.filter((look) => look.gone);
    for (const id of this.suspicions.keys()) if (!gone.some((look) => look.id === id)) this.suspicions.delete(id);
    const fresh = gone.filter((look) => !this.isSame(look));
    // The process that looks belongs to the fleet and is evidently there.
    if (fresh.length > 1 && fresh.length > (looks.length + 1) / 2) {
      this.restsUntil = now + this.ttlMs;
      this.suspicions.clear();
    }
    if (now < this.restsUntil) return { dead: [], resting: true };
    for (const { id, beat_at, lock_no } of fresh)
      this.suspicions.set(id, { since: now, beatAt: beat_at, lockNo: lock_no });
    const dead = gone.filter(
      (look) => now - (this.suspicions.get(look.id)?.since ?? now) >= this.graceMs && !fresh.includes(look),
    );
    return { dead, resting: false };
  }

  private isSame(look: SessionLook): boolean {
    const seen = this.suspicions.get(look.id);
    return seen !== undefined && seen.beatAt === look.beat_at && seen.lockNo === look.lock_no;
  }
}
