import { Injectable } from '@nestjs/common';
import { WakeUp } from '../claim/wake-up';
import { LeaderService } from '../leader/leader.service';
import { ResolvedOptions } from '../options/lease-options';
import { sleep } from '../storage/delays';
import { RescueService } from './rescue.service';

/**
 * When the three ways run: way 1 on the leader, every second; ways 2 and 3 on the leader and, when no leader has completed a pass for a
 * TTL, on every worker (R15).
 */
@Injectable()
export class RescueLoop {
  private stopping = new AbortController();
  private running: Promise<unknown> | undefined;

  constructor(
    private readonly rescue: RescueService,
    private readonly leader: LeaderService,
    private readonly options: ResolvedOptions,
    private readonly wakeUp: WakeUp,
  ) {}

  start(): void {
    if (this.running) return;
    this.stopping = new AbortController();
    const { signal } = this.stopping;
    this.running = Promise.all([this.lookForVanished(signal), this.scan(signal)]);
  }

  async stop(): Promise<void> {
    this.stopping.abort();
    await this.running;
    this.running = undefined;
  }

  private async lookForVanished(signal: AbortSignal): Promise<void> {
    if (!this.options.rescue.session) return;
    while (!signal.aborted) {
      if (this.leader.isLeader) this.tell(await this.rescue.attempt('session', () => this.rescue.rescueVanished()));
      await sleep(this.options.rescue.sessionEveryMs, signal);
    }
  }

  private async scan(signal: AbortSignal): Promise<void> {
    const { rescue } = this.options;
    while (!signal.aborted) {
      await sleep(rescue.everyMs, signal);
      if (signal.aborted) return;
      const leads = this.leader.isLeader;
      if (!leads && !(await this.isLeaderStale())) continue;
      // Independent of each other: one that fails, or is switched off, leaves the other at work (R9).
      const moved = [
        rescue.lease
          ? await this.rescue.attempt('lease', () => this.rescue.rescueExpired())
          : rescue.session
            ? await this.rescue.attempt('orphans', () => this.rescue.rescueOrphans())
            : 0,
        rescue.deadline ? await this.rescue.attempt('deadline', () => this.rescue.rescueOverdue()) : 0,
      ];
      for (const count of moved) this.tell(count);
      if (leads && !moved.includes(undefined)) {
        await this.rescue.attempt('stamp', async () => {
          await this.leader.stamp();
          return 0;
        });
      }
    }
  }

  private async isLeaderStale(): Promise<boolean> {
    try {
      return await this.leader.isStale();
    } catch {
      return false; // The database is away; there is nothing to rescue with.
    }
  }

  private tell(moved: number | undefined): void {
    if (moved) this.wakeUp.notify([]);
  }
}
