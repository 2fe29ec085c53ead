import { monotonicMs } from '../storage/delays';
import type { Lane } from './wake-up';

/** How far back a claim looks in a lane: from where the last one ended, from where nothing can be any more, or from the start. */
export type Look = 'fast' | 'safe' | 'full';

/**
 * Where a claim looks within its lanes: at priorities between two, or, if the two are the same, at positions of that priority between two. All
 * without the bounds.
 */
export interface Ranges {
  looks: Look[];
  /** Of each lane the number of ranges up to its last one. */
  ends: number[];
  fromPriorities: number[];
  toPriorities: number[];
  fromPositions: string[];
  toPositions: string[];
  /** What had been seen when the claim was sent; see `Seen`. */
  after: number;
}

/** What a claim saw: the rows that it took, and the bounds of its transaction. */
export interface Seen {
  lanes: readonly Lane[];
  ranges: Ranges;
  /** Without suspects, which have no marks. */
  jobs: readonly { queue: string; kind: string; priority: number }[];
  /** Of each job. */
  positions: readonly number[];
  /** Of each lane: every row that was free came back. */
  exhausted: readonly boolean[];
  /** The lowest transaction that was running when the rows were chosen. */
  xmin: number;
  /** The claim's own transaction; 0 = it wrote nothing. */
  xid: number;
  /** What choosing took, µs, in the database. */
  us: number;
}

const BEFORE_ALL = -32_769;
const AFTER_ALL = 32_768;
const FIRST_POSITION = '-9223372036854775808';
const LAST_POSITION = '9223372036854775807';
/** Marks kept for one lane. More priorities in use than this, and the least ones are looked for from the start. */
const MAX_PRIORITIES = 16;
const MAX_PENDING = 64;
/** What choosing takes where nothing is in the way. */
const usualUs = (rows: number): number => 500 + 4 * rows;
/** A look further back may come again after this many times what it cost beyond the usual: 5 % of the time at most. */
const REST = 20;
const FULL_EVERY_MS = 1000;
const LONGEST_REST_MS = 60_000;
const MAX_LANES = 2000;

interface Mark {
  /** Nothing that a claim has seen free lies at or below it. */
  fast: number;
  /** Nothing lies at or below it, and nothing ever will. */
  safe: number;
  /** Taken up to here by the claim that was seen as number `no`; safe to say once every transaction below xid has ended. */
  pending: { taken: number; no: number; xid: number | undefined }[];
}

interface LaneState {
  marks: Map<number, Mark>;
  fullAfter: number;
}

/**
 * The low-water marks of the lanes: rows that are claimed are dead, and while anybody keeps an old snapshot open they cannot be
 * cleaned away, so a claim that walks from the head of the lane walks over all of them. A mark says where to begin instead.
 *
 * Positions are handed out before they are committed, so a transaction that took an early one may commit it late, below what has been
 * seen (a straggler); and a row that a claim found locked comes free again if the other rolls back. Hence two marks. `fast` is
 * what was taken last. `safe` advances to what a look from `safe` took only when another look from there was made with a snapshot in
 * which every transaction has ended whose number is below that of a claim *sent after the first one's answer*: enqueues have their
 * number before they take a position (enqueue_v1), whoever held a lock had one too, so all of them are below it, and nothing can come
 * up there any more. (The first claim's own number is no such bound, since its settle may have taken it long before it chose; nor is a
 * snapshot's xmax, which only counts what has ended.) Looks from `safe` are as frequent as their cost allows, usually every one;
 * one from the start at most every second for each lane catches what no rule foresaw. What was given back (negative positions) and
 * priorities without a mark are always looked at from their start.
 */
export class LaneMarks {
  private readonly lanes = new Map<string, LaneState>();
  private safeAfter = 0;
  private seen = 0;

  constructor(private readonly now: () => number = monotonicMs) {}

  /** Where the next claim should look in each lane; `wanted` in all of them. */
  ranges(lanes: readonly Lane[], wanted?: Look): Ranges {
    const now = this.now();
    const ranges: Ranges = {
      looks: [],
      ends: [],
      fromPriorities: [],
      toPriorities: [],
      fromPositions: [],
      toPositions: [],
      after: this.seen,
    };
    const add = (fromPriority: number, toPriority: number, fromPosition: string, toPosition: string): void => {
      ranges.fromPriorities.push(fromPriority);
      ranges.toPriorities.push(toPriority);
      ranges.fromPositions.push(fromPosition);
      ranges.toPositions.push(toPosition);
    };
    for (const lane of lanes) {
      const state = this.lanes.get(keyOf(lane));
      const look = wanted ?? (now >= (state?.fullAfter ?? 0) ? 'full' : now >= this.safeAfter ? 'safe' : 'fast');
      const marks = look === 'full' || !state ? [] : [...state.marks];
      let above = BEFORE_ALL;
      for (const [priority, mark] of marks.sort(([a], [b]) => a - b)) {
        add(above, priority, '0', '0');
        add(priority, priority, FIRST_POSITION, '0');
        add(priority, priority, String(look === 'fast' ? mark.fast : mark.safe), LAST_POSITION);
        above = priority;
      }
      add(above, AFTER_ALL, '0', '0');
      ranges.looks.push(look);
      ranges.ends.push(ranges.fromPriorities.length);
    }
    return ranges;
  }

  saw({ lanes, ranges, jobs, positions, exhausted, xmin, xid, us }: Seen): void {
    const no = ++this.seen;
    this.rest(lanes, ranges, us, jobs.length);
    const found = spansOf(jobs, positions);
    lanes.forEach((lane, i) => {
      const key = keyOf(lane);
      const inLane = found.get(key);
      const state = this.lanes.get(key);
      if (!state) return;
      const { marks } = state;
      const look = ranges.looks[i];
      for (const [priority, mark] of marks) {
        if (xid > 0) for (const entry of mark.pending) if (entry.no <= ranges.after) entry.xid ??= xid;
        const at = inLane?.get(priority);
        // A lane that was cut short may hold more than it gave.
        if (look !== 'fast' && (at || exhausted[i])) settle(mark, at?.first ?? Infinity, xmin);
      }
      for (const [priority, { last }] of inLane ?? []) {
        const mark = marks.get(priority) ?? { fast: 0, safe: 0, pending: [] };
        // Last in, last out: what is used stays.
        marks.delete(priority);
        marks.set(priority, mark);
        mark.fast = Math.max(mark.fast, last);
        // A fast look has not seen what lies between the two marks.
        if (look === 'fast') continue;
        if (mark.pending.length >= MAX_PENDING) mark.pending.pop();
        mark.pending.push({ taken: last, no, xid: undefined });
      }
      for (const priority of marks.keys()) {
        if (marks.size <= MAX_PRIORITIES) break;
        marks.delete(priority);
      }
    });
  }

  /** A claim that ran into a limit of the database, after so long: it is not looked that far back again for a while. */
  gaveUp(lanes: readonly Lane[], ranges: Ranges, us: number): void {
    this.rest(lanes, ranges, us, 0);
  }

  /** Forgets everything: the connection was lost. */
  reset(): void {
    this.lanes.clear();
    this.safeAfter = 0;
  }

  private rest(lanes: readonly Lane[], { looks }: Ranges, us: number, rows: number): void {
    const now = this.now();
    const restMs = Math.min(LONGEST_REST_MS, (Math.max(0, us - usualUs(rows)) / 1000) * REST);
    if (looks.includes('safe') && !looks.includes('full')) this.safeAfter = now + restMs;
    lanes.forEach((lane, i) => {
      if (looks[i] !== 'full') return;
      const key = keyOf(lane);
      const state = this.lanes.get(key) ?? { marks: new Map<number, Mark>(), fullAfter: 0 };
      state.fullAfter = now + Math.max(FULL_EVERY_MS, restMs);
      // The lanes that were not looked at for longest go first.
      this.lanes.delete(key);
      this.lanes.set(key, state);
    });
    for (const key of this.lanes.keys()) {
      if (this.lanes.size <= MAX_LANES) break;
      this.lanes.delete(key);
    }
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
  for (let [oldest] = mark.pending; oldest?.xid !== undefined && oldest.xid <= xmin; [oldest] = mark.pending) {
    mark.safe = Math.max(mark.safe, Math.min(oldest.taken, first - 1));
    mark.pending.shift();
  }
}

const keyOf = ([queue, kind]: Lane): string => `${queue}\0${kind}`;
