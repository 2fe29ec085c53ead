/** How large and how long the cases are: two columns of figures, of which `--quick` picks one, times `--scale`. */
export class Plan {
  constructor(
    readonly quick: boolean,
    /** Fraction of sizes and times, for smoke tests. */
    readonly scale: number,
  ) {}

  /** A number of jobs. */
  jobs(full: number, quick: number): number {
    return Math.max(10, Math.round((this.quick ? quick : full) * this.scale));
  }

  /** A time in seconds, but never under `least`: shorter, and there is nothing to see. */
  seconds(full: number, quick: number, least = 0.3): number {
    return Math.max(least, (this.quick ? quick : full) * this.scale);
  }

  /** A number that does not scale: repetitions, rates. */
  pick<T>(full: T, quick: T): T {
    return this.quick ? quick : full;
  }
}
