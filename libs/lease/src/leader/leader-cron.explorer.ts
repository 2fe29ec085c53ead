import { Injectable } from '@nestjs/common';
import { DiscoveryService, MetadataScanner } from '@nestjs/core';
import { LEADER_CRON, bindLeader } from './leader-cron.decorator';
import { MaintenanceService } from '../maintenance/maintenance.service';
import type { LeaderService } from './leader.service';

/** Tells each instance with `@LeaderCron` methods which leader to ask. */
@Injectable()
export class LeaderCronExplorer {
  constructor(
    private readonly discovery: DiscoveryService,
    private readonly scanner: MetadataScanner,
  ) {}

  /** Binds all `@LeaderCron` methods of the lease instance `name`. @returns names that they ask for */
  bind(name: string, leader: LeaderService): Set<string> {
    const asked = new Set<string>();
    for (const { instance } of [...this.discovery.getProviders(), ...this.discovery.getControllers()] as {
      instance: unknown;
    }[]) {
      // Our own maintenance asks the leader of its own instance, whatever that is called.
      if (typeof instance !== 'object' || instance === null || instance instanceof MaintenanceService) continue;
      const prototype = Object.getPrototypeOf(instance) as Record<string, unknown> | null;
      if (!prototype) continue;
      for (const method of this.scanner.getAllMethodNames(prototype)) {
        const wanted = Reflect.getMetadata(LEADER_CRON, prototype[method] as object) as string | undefined;
        if (wanted === undefined) continue;
        asked.add(wanted);
        if (wanted === name) bindLeader(instance, name, leader);
      }
    }
    return asked;
  }
}
