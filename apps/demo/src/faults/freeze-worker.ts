import { setTimeout as sleep } from 'node:timers/promises';
import type { LeaseEvent } from '@leasehold/nestjs';
import { TTL_MS } from '../lease-settings';
import { plural, seconds } from '../output/format';
import { freeze } from '../run/freezer';
import { until } from '../run/until';
import type { WorkerProcess } from '../run/worker-process';
import { type FaultContext, findBusy, heldBy } from './context';
import { Recovery } from './recovery';

const TRIES = 5;
const LONGER_THAN_LEASE_MS = TTL_MS + 500;
/** All late results of one worker come at once. */
const LATE_RESULTS_MS = 300;

/**
 * Freezes a worker with SIGSTOP while it runs jobs, until its lease has expired and its jobs run elsewhere, then lets it go on: its handlers
 * finish, and what they want to write is refused.
 */
export async function freezeWorker(context: FaultContext): Promise<void> {
  const { timeline } = context;
  for (let tries = 0; tries < TRIES; tries++) {
    const victim = await findBusy(context);
    if (!victim) break;
    if (await freezeThis(victim, context)) return;
    await sleep(100);
  }
  timeline.tell('no job is in flight any more that a freeze could hit', 'dim');
}

/** @returns false when it held nothing after all */
async function freezeThis(victim: WorkerProcess, context: FaultContext): Promise<boolean> {
  const { fleet, timeline, signal } = context;
  const workerId = victim.workerId;
  if (workerId === undefined) return false;
  const recovery = new Recovery(context, victim, workerId, 'freeze');
  const frozen = await freeze(victim.pid);
  const began = performance.now();
  victim.state = 'frozen';
  try {
    const held = await heldBy(context, workerId);
    if (held.length === 0) return false;
    recovery.follow(held);
    timeline.tell(
      `❄ ${victim.name} (pid ${victim.pid}) is frozen with SIGSTOP, ${plural(held.length, 'job')} in flight; its connections stay open`,
      'cold',
    );
    if (fleet.up.length === 0) {
      const standIn = fleet.start();
      timeline.tell(`${standIn.name} (pid ${standIn.pid}) is started, since nobody else would be left to notice`);
    }
    await recovery.complete();
    await recovery.exampleDone();
    await sleep(Math.max(0, LONGER_THAN_LEASE_MS - (performance.now() - began)), undefined, { signal });
    const late = new LateResults(context, workerId);
    timeline.tell(
      `${victim.name} is thawed after ${seconds(performance.now() - began)}; its handlers go on as if nothing had been`,
      'cold',
    );
    victim.state = 'up';
    await frozen.thaw();
    await late.tell(victim);
    return true;
  } finally {
    if (victim.state === 'frozen') victim.state = 'up';
    await frozen.thaw();
    recovery.end();
  }
}

/** Collects what a thawed worker reports too late. */
class LateResults {
  private readonly refused: (LeaseEvent & { type: 'job.refused' })[] = [];
  private readonly unlisten: () => void;

  constructor(
    private readonly context: FaultContext,
    private readonly workerId: string,
  ) {
    this.unlisten = context.fleet.listen((event) => {
      if (event.type === 'job.refused' && event.workerId === workerId) this.refused.push(event);
    });
  }

  async tell(victim: WorkerProcess): Promise<void> {
    const { timeline, jobs, signal } = this.context;
    try {
      await until('The late results', () => this.refused.length > 0, { signal, timeoutMs: 10_000 });
      await sleep(LATE_RESULTS_MS, undefined, { signal });
    } catch (error) {
      signal.throwIfAborted();
      timeline.tell((error as Error).message, 'bad');
    } finally {
      this.unlisten();
    }
    const [first] = this.refused;
    if (!first) return;
    const job = await jobs.get(first.jobId);
    timeline.tell(
      `${victim.name}: ${plural(this.refused.length, 'late result')} refused. Job ${first.jobId}, '${first.outcome}' under token ` +
        `${first.token}: the job is ${job.state} under token ${job.token ?? 'none'}, and stays so`,
      'good',
    );
    await until('A new registration', () => victim.workerId !== this.workerId, { signal, timeoutMs: 15_000 });
    timeline.tell(`${victim.name} aborts what it held and registers anew, as ${victim.workerId}`);
  }
}
