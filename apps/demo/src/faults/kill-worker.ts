import { CONCURRENCY } from '../documents/index-document.handler';
import { plural } from '../output/format';
import { type FaultContext, findBusy, heldBy } from './context';
import { Recovery } from './recovery';

/** A worker that was killed with jobs in flight. */
export interface Kill {
  workerId: string;
  /** By the database's clock, as text. */
  at: string;
}

const TRIES = 3;

/**
 * Kills a worker with SIGKILL while it runs jobs, starts another in its place, and waits until all its jobs are with others.
 * @returns undefined when there was nothing left in flight
 */
export async function killWorker(context: FaultContext): Promise<Kill | undefined> {
  const { fleet, timeline, database, progress } = context;
  for (let tries = 0; tries < TRIES; tries++) {
    const victim = await findBusy(context);
    const workerId = victim?.workerId;
    if (!victim || workerId === undefined) break;
    const leads = fleet.isLeader(victim) ? ', the leader,' : '';
    const recovery = new Recovery(context, victim, workerId, 'kill');
    try {
      const [clock] = await database.query<{ now: string }>('SELECT clock_timestamp()::text AS now');
      fleet.expected.add(victim);
      victim.kill('SIGKILL');
      await victim.exited;
      const lost = await heldBy(context, workerId);
      recovery.follow(lost);
      timeline.tell(
        `✗ ${victim.name} (pid ${victim.pid})${leads} is killed with SIGKILL, ${plural(lost.length, 'job')} in flight`,
        'bad',
      );
      const successor = fleet.start();
      timeline.tell(`${successor.name} (pid ${successor.pid}) is started in its place`);
      if (lost.length === 0) continue;
      await Promise.race([recovery.complete(), successor.exited.then(() => successor.ready)]);
      // With little else left to do, the re-runs are what the next fault has to find in flight.
      if ((await progress.queued()) > fleet.workers.length * CONCURRENCY) await recovery.exampleDone();
      return { workerId, at: clock?.now ?? '' };
    } finally {
      recovery.end();
    }
  }
  timeline.tell('no job is in flight any more that a kill could hit', 'dim');
  return undefined;
}
