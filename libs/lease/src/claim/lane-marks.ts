import { monotonicMs } from '../storage/delays';
import type { Lane } from './wake-up';

/** Where a claim looks within its lanes: parallel lists. Rows after (priority, position) and before (toPriority, 0). */
export interface Ranges {
  /** Index of the lane, counted from 1. */
  lanes: number[];
  fromPriorities: number[];
  fromPositions: number[];
  toPriorities: number[];
}

/** How far back a claim looks: from where the last one ended, from where nothing can be any more, or from the start. */
export type Look = 'fast' | 'safe' | 'full';

/** What a claim saw: the rows that it took, and the bounds of its snapshots. */
export interface Seen {
  look: Look;
  lanes: readonly Lane[];
  jobs: readonly { queue: string; kind: string; priority: number }[];
  /** Of each job. */
  positions: readonly number[];
  /** Every row that was free came back: a lane of which none did has none. */
  complete: boolean;
  /** The lowest transaction that was running when the rows were chosen. */
  xmin: number;
  /** The transaction that took them. */
  xid: number;
  /** What choosing took, µs, in the database. */
  us: number;
}

const BEFORE_ALL = -32_769;
const AFTER_ALL = 32_768;
/** Marks kept for one lane. More priorities in use than this, and the least ones are looked for from the start. */
const MAX_PRIORITIES = 16;
const MAX_PENDING = 64;
/** What choosing takes where nothing is in the way. */
const usualUs = (rows: number): number => 500 + 4 * rows;
/** A look further back may come again after this many times what it cost beyond the usual: 5 % of the time at most. */
const REST = 20;
const FULL_EVERY_MS = 1000;

interface Mark {
  /** Nothing that a claim has seen free lies at or below it. */
  fast: number;
  /** Nothing lies at or below it, and nothing ever will. */
  safe: number;
  /** Taken up to here, by transaction xid: every one below it has to end before that is safe to say. */
  pending: { taken: number; xid: number }[];
}

/**
 * The low-water marks of the lanes: rows that are claimed are dead, and while anybody keeps an old snapshot open they cannot be
 * cleaned away, so a claim that walks from the head of the lane walks over all of them. A mark says where to begin instead.
 *
 * Positions are handed out before they are committed, so a transaction that took an early one may commit it late, below what has been
 * seen (a straggler); and a row that a claim found locked comes free again if the other rolls back. Hence two marks. `fast` is
 * what was taken last. `safe` advances to what was taken only when a later look from `safe` was made with a snapshot in
 * which every transaction has ended whose number is below that of the claim: enqueues have theirs before they take a position
 * (enqueue_v1), and whoever held a lock had it before the claim began, so nothing can come up there any more. (A snapshot's xmax
 * is no such bound: it only counts what has ended.) Looks from `safe` are as frequent as their cost allows (usually every one), and
 * one from the start at most every second catches what no rule foresaw, such as positions that a failover handed out
 * again. Negative positions (given back) and priorities without a mark are always looked at from their start.
 */
export class LaneMarks {
  private readonly lanes = new Map<string, Map<number, Mark>>();
  private safeAfter = 0;
  private fullAfter = 0;

  constructor(private readonly now: () => number = monotonicMs) {}

  /** How far the next claim should look back. */
  look(): Look {
    const now = this.now();
    return now >= this.fullAfter ? 'full' : now >= this.safeAfter ? 'safe' : 'fast';
  }

  ranges(lanes: readonly Lane[], look: Look): Ranges {
    const ranges: Ranges = { lanes: [], fromPriorities: [], fromPositions: [], toPriorities: [] };
    lanes.forEach((lane, i) => {
      let [priority, position] = [BEFORE_ALL, 0];
      const add = (to: number): void => {
        ranges.lanes.push(i + 1);
        ranges.fromPriorities.push(priority);
        ranges.fromPositions.push(position);
        ranges.toPriorities.push(to);
      };
      const marks = look === 'full' ? [] : [...(this.lanes.get(keyOf(lane)) ?? [])];
      for (const [next, mark] of marks.sort(([a], [b]) => a - b)) {
        add(next);
        [priority, position] = [next, mark[look as 'fast' | 'safe']];
      }
      add(AFTER_ALL);
    });
    return ranges;
  }

  saw({ look, lanes, jobs, positions, complete, xmin, xid, us }: Seen): void {
    this.rest(look, us, jobs.length);
    const found = spansOf(jobs, positions);
    for (const lane of lanes) {
      const key = keyOf(lane);
      const inLane = found.get(key);
      const marks = this.lanes.get(key) ?? new Map<number, Mark>();
      for (const [priority, mark] of marks) {
        const at = inLane?.get(priority);
        // A lane that gave nothing to a claim cut short may not have been looked at to its end.
        if (look !== 'fast' && (at || complete)) settle(mark, at?.first ?? Infinity, xmin);
      }
      if (!inLane) continue;
      this.lanes.set(key, marks);
      for (const [priority, { last }] of inLane) {
        const mark = marks.get(priority) ?? { fast: 0, safe: 0, pending: [] };
        // Last in, last out: what is used stays.
        marks.delete(priority);
        marks.set(priority, mark);
        mark.fast = Math.max(mark.fast, last);
        // A fast look has not seen what lies between the two marks.
        if (look === 'fast') continue;
        if (mark.pending.length >= MAX_PENDING) mark.pending.pop();
        mark.pending.push({ taken: last, xid });
      }
      for (const priority of marks.keys()) {
        if (marks.size <= MAX_PRIORITIES) break;
        marks.delete(priority);
      }
    }
  }

  /** Forgets everything: the connection was lost, and another server may hand out positions again. */
  reset(): void {
    this.lanes.clear();
    this.safeAfter = 0;
    this.fullAfter = 0;
  }

  private rest(look: Look, us: number, rows: number): void {
    if (look === 'fast') return;
    const restMs = (Math.max(0, us - usualUs(rows)) / 1000) * REST;
    const now = this.now();
    if (look === 'safe') this.safeAfter = now + restMs;
    else this.fullAfter = now + Math.max(FULL_EVERY_MS, restMs);
  }
}

interface Span {
  queue: string;
  kind: string;
  priority: number;
  first: number;
  last: number;
}

/** The first and the last position taken, by lane and priority. Neighbours are mostly of the same one. */
function spansOf(jobs: Seen['jobs'], positions: Seen['positions']): Map<string, Map<number, Span>> {
  const spans = new Map<string, Map<number, Span>>();
  let span: Span | undefined;
  jobs.forEach(({ queue, kind, priority }, i) => {
    const position = positions[i] ?? 0;
    if (position <= 0) return;
    if (span?.kind !== kind || span.priority !== priority || span.queue !== queue) {
      const key = keyOf([queue, kind]);
      const inLane = spans.get(key) ?? new Map<number, Span>();
      spans.set(key, inLane);
      span = inLane.get(priority) ?? { queue, kind, priority, first: position, last: position };
      inLane.set(priority, span);
    }
    if (position < span.first) span.first = position;
    if (position > span.last) span.last = position;
  });
  return spans;
}

/** Nothing was free below `first` in a snapshot that knows the end of every transaction below `xmin`. */
function settle(mark: Mark, first: number, xmin: number): void {
  while (mark.pending[0] && mark.pending[0].xid <= xmin) {
    const { taken } = mark.pending.shift() as { taken: number };
    mark.safe = Math.max(mark.safe, Math.min(taken, first - 1));
  }
}

const keyOf = ([queue, kind]: Lane): string => `${queue}\0${kind}`;
