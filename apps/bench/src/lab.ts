import type { EmbeddedPostgres } from '@leasehold/embedded-postgres';
import { type ContenderName, STORES } from './contenders/contender';
import { Fleet } from './contenders/fleet';
import { agentNode } from './environment/peers';
import { startPostgres } from './environment/postgres';
import { type Redis, startRedis } from './environment/redis';
import { Trial } from './trial';

/** The servers and processes of a benchmark, all of which end with it. */
export class Lab {
  private redis: Redis | undefined;

  private constructor(
    readonly postgres: EmbeddedPostgres,
    readonly fleet: Fleet,
    readonly signal: AbortSignal,
  ) {
    // Whoever waits for an agent's answer is told at once.
    signal.addEventListener('abort', () => void fleet.endAll(), { once: true });
  }

  static async open(signal: AbortSignal): Promise<Lab> {
    return new Lab(await startPostgres(), new Fleet(agentNode()), signal);
  }

  async addRedis(version: string): Promise<void> {
    this.redis = await startRedis(version);
  }

  /** One run on an empty store; whatever it has started is gone afterwards. */
  async trial<T>(contender: ContenderName, work: (trial: Trial) => Promise<T>): Promise<T> {
    this.signal.throwIfAborted();
    const redis = STORES[contender] === 'redis' ? this.redis : undefined;
    const trial = await Trial.open(this, contender, redis);
    try {
      return await work(trial);
    } finally {
      await trial.close();
    }
  }

  async close(): Promise<void> {
    await this.fleet.endAll();
    await this.redis?.stop();
    await this.postgres.stop();
  }
}
