import type { Answer, Move, MoveRow, Outcome } from '../settle/outcome';
import type { HeldLease } from './held-leases';
import type { LeasedJob } from './leased-job';

const MAX_BATCH = 1000;

/** An outcome that the database has not answered for yet. */
export interface Pending {
  job: LeasedJob;
  lease: HeldLease | undefined;
  outcome: Outcome;
  /** It was sent before, and the reply lost: moving nothing may mean that it is done. */
  repeat: boolean;
  /** Times that the database refused it for its content. */
  refusals: number;
  /** Times that somebody else had its lease locked. */
  locked: number;
  answered: (job: LeasedJob, outcome: Outcome, answer: Answer) => void;
}

/** What was recorded of a lease, for each thing that its holder may say of it. */
const RECORDED_AS: Record<Outcome['event'], readonly string[]> = {
  complete: ['completed'],
  fail: ['failed'],
  fatal: ['failed'],
  snooze: ['snoozed'],
  stopped: ['cancelled', 'paused', 'released'],
  release: ['released'],
  return: ['released'],
  deadline: ['dead'],
  giveback: [],
};

/** Whether what is on record is what this outcome would have left: anything else was somebody else's doing, a rescue's for example. */
export const isRecordOf = ({ event }: Outcome, recorded: string): boolean => RECORDED_AS[event].includes(recorded);

/** A completion goes out with a claim, unless somebody else had its lease locked: what waits for locks must not hold up claims. */
export const ridesWithClaim = ({ outcome, locked }: Pending): boolean => outcome.event === 'complete' && locked === 0;

/**
 * Takes the next batch out of `pending`: either completions (they ride with a claim) or other moves, of one worker, sorted by job so that
 * two batches cannot deadlock.
 */
export function takeBatch(pending: Pending[]): { batch: Pending[]; rest: Pending[] } {
  const first = pending[0];
  if (!first) return { batch: [], rest: pending };
  const same = (p: Pending): boolean =>
    p.job.workerId === first.job.workerId && ridesWithClaim(p) === ridesWithClaim(first);
  let batch: Pending[] = [];
  const rest: Pending[] = [];
  if (pending.length <= MAX_BATCH && pending.every(same)) batch = pending;
  else for (const one of pending) (batch.length < MAX_BATCH && same(one) ? batch : rest).push(one);
  return { batch: batch.sort((a, b) => compareIds(a.job.id, b.job.id)), rest };
}

/** The parameter of `move_v1`. */
export const movesJson = (batch: readonly Pending[]): string => `[${batch.map(moveJson).join(',')}]`;

function moveJson({ job, outcome }: Pending): string {
  const fence = { job: job.id, token: job.token, worker: job.workerId };
  if (outcome.event !== 'complete') return JSON.stringify({ ...fence, ...outcome } satisfies Move);
  const json = JSON.stringify({ ...fence, event: 'complete' } satisfies Move);
  return outcome.result === null ? json : `${json.slice(0, -1)},"result":${outcome.result}}`;
}

export type Moved = Pick<MoveRow, 'place' | 'reason'>;

export const APPLIED: Answer = { applied: true, place: 'completed' };
export const REFUSED: Answer = { applied: false };

export const answerOf = ({ place, reason }: Moved): Answer =>
  place === 'completed' ? APPLIED : { applied: true, place, ...(reason === null ? {} : { reason }) };

/** Numeric order of decimal text without leading zeros. */
const compareIds = (a: string, b: string): number => a.length - b.length || (a < b ? -1 : a > b ? 1 : 0);
