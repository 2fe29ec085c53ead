import { Injectable, type Type } from '@nestjs/common';
import { DiscoveryService, MetadataScanner } from '@nestjs/core';
import { LEADER_CRON, bindLeader } from './leader-cron.decorator';
import type { LeaderService } from './leader.service';

/** Tells each instance with `@LeaderCron` methods which leader to ask. */
@Injectable()
export class LeaderCronExplorer {
  constructor(
    private readonly discovery: DiscoveryService,
    private readonly scanner: MetadataScanner,
  ) {}

  /**
   * Binds the users' `@LeaderCron` methods to the lease instance `name`, if that is what they ask for.
   * @param own classes that are bound otherwise
   * @returns names that are asked for
   */
  bind(name: string, leader: LeaderService, own: readonly Type<object>[]): Set<string> {
    const asked = new Set<string>();
    for (const { instance } of [...this.discovery.getProviders(), ...this.discovery.getControllers()] as {
      instance: unknown;
    }[]) {
      if (typeof instance !== 'object' || instance === null || own.some((type) => instance instanceof type)) continue;
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
