/** Numbers that are the same for the same seed. Each actor has a stream of its own, so that what it does does not depend on when others act. */
export class Random {
  private state: number;

  constructor(seed: number) {
    this.state = seed >>> 0;
  }

  /** A stream for one actor, the same whatever the others draw. */
  static for(seed: number, actor: string): Random {
    let hash = seed >>> 0;
    for (const char of actor) hash = (Math.imul(hash ^ (char.codePointAt(0) ?? 0), 0x01000193) + 0x9e3779b9) >>> 0;
    return new Random(hash);
  }

  /** From 0 up to 1. Mulberry32. */
  next(): number {
    this.state = (this.state + 0x6d2b79f5) >>> 0;
    let t = this.state;
    t = Math.imul(t ^ (t >>> 15), t | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4_294_967_296;
  }

  /** A whole number from `min` to `max`. */
  int(min: number, max: number): number {
    return min + Math.floor(this.next() * (max - min + 1));
  }

  chance(share: number): boolean {
    return this.next() < share;
  }

  pick<T>(items: readonly T[]): T {
    const item = items[Math.floor(this.next() * items.length)];
    if (item === undefined) throw new Error('there is nothing to pick from');
    return item;
  }
}
